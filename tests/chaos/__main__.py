"""Injects faults into every part of a real fleet while 32 streams are open.

    python -m tests.chaos                                        # everything, about 25 minutes
    python -m tests.chaos --only engine-kill --rounds 20
    python -m tests.chaos --only redis-down,etcd-down --outage 10

Three engines on a tiny random model in `deterministic` mode, two gateways, two balancers, a
KV-cache service, Redis and etcd, all real processes. Every answer is compared token by token with
that of the undisturbed run. The exit status is 1 if a request failed, a token was lost, sent twice
or changed, a service that was not hit reported itself unhealthy, or streams stalled for too long.
"""

import argparse
import asyncio
import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.chaos.report import as_json, header, line
from tests.chaos.run import SCENARIOS, run_all
from tests.chaos.scenario import Plan, Row


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.chaos",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--only", default="", help=f"comma list of {', '.join(SCENARIOS)}")
    parser.add_argument("--streams", type=int, default=32, help="open all the time; default 32")
    parser.add_argument("--rounds", type=int, default=20, help="kills in a row; default 20")
    parser.add_argument("--outage", type=float, default=60.0, help="seconds a store is away")
    parser.add_argument("--pause", type=float, default=15.0, help="seconds a store is stopped")
    parser.add_argument("--engines", type=int, default=3)
    parser.add_argument("--slow-machine", action="store_true", help="print times, judge none")
    parser.add_argument("--json", type=Path, help="write everything there")
    parser.add_argument("--logs", type=Path, help="keep the services' logs in this new directory")
    args = parser.parse_args(argv)
    args.names = args.only.split(",") if args.only else list(SCENARIOS)
    unknown = [name for name in args.names if name not in SCENARIOS]
    if unknown:
        parser.error(f"--only: {unknown[0]!r} is none of {', '.join(SCENARIOS)}")
    if min(args.streams, args.rounds, args.engines - 1) < 1:
        parser.error("--streams and --rounds must be at least 1, --engines at least 2")
    return args


async def chaos(args: argparse.Namespace) -> int:
    """Run and print; the exit status."""
    plan = Plan(args.streams, args.rounds, args.outage, args.pause)
    rows: list[Row] = []
    bad: dict[str, list[str]] = {}
    async for row in run_all(args.names, args.engines, plan, _say, args.logs):
        rows.append(row)
        _say(header() + "\n" + line(row))
        problems = row.judge(strict_times=not args.slow_machine)
        if problems:
            bad[row.scenario] = problems
        if args.json:  # after each scenario, so that an interrupted run leaves its results
            command = "python -m tests.chaos " + shlex.join(sys.argv[1:])
            args.json.write_text(json.dumps(as_json(rows, command, bad), indent=1) + "\n")
    print("\n" + "\n".join([header(), *(line(row) for row in rows)]))
    for name, problems in bad.items():
        print("\n".join(f"VIOLATION {name}: {problem}" for problem in problems))
    return 1 if bad or not rows else 0


def _say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(asyncio.run(chaos(arguments())))
