"""`inferfleet trace`: where one recent request of a local fleet spent its time."""

import argparse
import sys

from inferfleet_cli.errors import to_json
from inferfleet_cli.supervisor.control import ask
from inferfleet_cli.waterfall import chart


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "trace",
        help="show where one request spent its time",
        description="Show the waterfall of one recent request of the local fleet: each service's"
        " spans, and in the engine the five verbs enqueue, admit, submit, collect, release.",
    )
    parser.add_argument("request_id", metavar="REQUEST_ID", help="a request's or a trace's id")
    parser.add_argument("--json", action="store_true", help="print the spans as JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    trace = ask(args.state_dir, "trace", request_id=args.request_id)
    print(to_json(trace) if args.json else chart(trace, ascii_only=not speaks_unicode()))
    return 0


def speaks_unicode() -> bool:
    return (sys.stdout.encoding or "").lower().replace("-", "").startswith("utf")
