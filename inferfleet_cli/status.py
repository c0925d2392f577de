"""`inferfleet status`: what runs in a local fleet, and how loaded its engines are."""

import argparse
from typing import Any

from inferfleet_cli.errors import to_json
from inferfleet_cli.supervisor.control import ask
from inferfleet_cli.supervisor.state_dir import StateDir
from inferfleet_cli.table import table


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "status",
        help="show what runs",
        description="Show the processes of the local fleet and its engines as the balancer sees"
        " them. Ends with status 0 if a fleet runs, 3 if none does.",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    if StateDir(args.state_dir).read_record() is None:
        where = str(args.state_dir)
        empty = to_json({"running": False, "state_dir": where, "services": [], "engines": []})
        print(empty if args.json else f"no fleet runs in {where}")
        return 3
    status = ask(args.state_dir, "status")
    print(to_json(status) if args.json else text(status))
    return 0


def text(status: dict[str, Any]) -> str:
    """For a person."""
    gateway = status["gateway"]
    lines = [
        f"gRPC {gateway.get('grpc', '-')}   HTTP {gateway.get('http', '-')}"
        f"   up {status['uptime_s']:.0f} s   state {status['state_dir']}",
        "",
        *table(
            ("service", "state", "pid", "address", "metrics", "restarts"),
            [
                (s["name"], s["state"], s["pid"] or "-", s["address"] or "-",
                 s["metrics_address"] or "-", s["restarts"])
                for s in status["services"]
            ],
        ),
        "",
        *table(
            ("engine", "state", "model", "dtype", "running", "waiting", "blocks", "placement"),
            [
                (e["engine_id"], e["state"], e["model"], e["dtype"], e["running"], e["waiting"],
                 f"{e['held_blocks']}/{e['total_blocks']}", e["placement_version"])
                for e in status["engines"]
            ],
        ),
    ]  # fmt: skip
    if "engines_error" in status:
        lines.append(f"the balancer does not answer: {status['engines_error']}")
    return "\n".join(lines)
