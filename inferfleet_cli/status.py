"""`inferfleet status`: shows the processes of a local fleet and the load of its engines."""

import argparse
from typing import Any

from inferfleet_cli.errors import to_json
from inferfleet_cli.supervisor.control import send_command
from inferfleet_cli.supervisor.state_dir import StateDir
from inferfleet_cli.table import table


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "status",
        help="show the local fleet's processes",
        description="Show the processes of the local fleet and its engines as the balancer lists"
        " them. The exit status is 0 if a fleet runs and 3 if none does.",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    if StateDir(args.state_dir).read_record() is None:
        where = str(args.state_dir)
        empty = to_json({"running": False, "state_dir": where, "services": [], "engines": []})
        print(empty if args.json else f"no fleet runs in {where}")
        return 3
    status = send_command(args.state_dir, "status")
    print(to_json(status) if args.json else status_text(status))
    return 0


def status_text(status: dict[str, Any]) -> str:
    """Format the status as text."""
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
