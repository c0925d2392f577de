"""`inferfleet trace`: shows where a recent request of a local fleet spent its time."""

import argparse
import sys

from inferfleet_cli.errors import to_json
from inferfleet_cli.supervisor.control import send_command
from inferfleet_cli.waterfall import chart


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "trace",
        help="show where one request spent its time",
        description="Show the waterfall of a recent request of the local fleet: the spans of each"
        " service, with the engine's steps enqueue, admit, submit, collect and release.",
    )
    parser.add_argument("request_id", metavar="REQUEST_ID", help="request id or trace id")
    parser.add_argument("--json", action="store_true", help="print the spans as JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    trace = send_command(args.state_dir, "trace", request_id=args.request_id)
    print(to_json(trace) if args.json else chart(trace, ascii_only=not can_print_unicode()))
    return 0


def can_print_unicode() -> bool:
    return (sys.stdout.encoding or "").lower().replace("-", "").startswith("utf")
