"""`inferfleet down`: stops the fleet of a state directory and waits until it has ended."""

import argparse
import contextlib
import os
import signal
import time
from pathlib import Path

from inferfleet_cli.errors import CliError
from inferfleet_cli.supervisor.state_dir import StateDir

POLL_S = 0.1


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "down",
        help="stop the local fleet",
        description="Drain and stop the fleet of --state-dir. Running streams may end first, within"
        " the grace period of `up --grace`.",
    )
    parser.add_argument("--now", action="store_true", help="cancel running streams")
    parser.add_argument(
        "--timeout", type=float, default=60.0, metavar="S", help="how long to wait (default 60)"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    state = StateDir(args.state_dir)
    pid = state.owner_pid()
    if pid is None:
        print(f"no fleet runs in {args.state_dir}")
        return 0
    _signal(pid)
    if args.now:
        time.sleep(POLL_S)
        _signal(pid)  # the second signal kills the services
    deadline = time.monotonic() + args.timeout
    while state.is_claimed() or not _has_ended(pid):
        if time.monotonic() > deadline:
            raise CliError(
                f"the supervisor (pid {pid}) has not stopped after {args.timeout:g} s:"
                " repeat with --now, or with a larger --timeout"
            )
        time.sleep(POLL_S)
    print("stopped")
    return 0


def _has_ended(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    # A zombie has ended; its parent has only not collected its status.
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    return False


def _signal(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGTERM)
