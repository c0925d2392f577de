"""`up --detach`: runs `up` in a background process and returns once the fleet serves."""

import subprocess
import sys
import time
from pathlib import Path

from inferfleet_cli.supervisor.state_dir import StateDir, flag

POLL_S = 0.1


def start_detached(state_dir: Path) -> int:
    """Run `up` in the background; returns 0 once the fleet serves, else the status of `up`.

    Raises:
        CliError: another fleet uses the state directory, or the directory cannot be written.
    """
    state = StateDir(state_dir)
    state.make()
    state.require_free()
    log = state.log_file("supervisor")
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "inferfleet_cli.main", *sys.argv[1:], "--in-background"],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        return _follow(process, state, log, f"inferfleet down{flag(state_dir)}")
    except KeyboardInterrupt:
        process.terminate()
        return process.wait() or 130


def _follow(process: "subprocess.Popen[bytes]", state: StateDir, log: Path, down: str) -> int:
    """Print the background process's log until the fleet serves or the process ends."""
    with log.open() as lines:
        while True:
            ended = process.poll()
            record = state.read_record()
            serving = record is not None and record["supervisor_pid"] == process.pid
            print(lines.read(), end="", flush=True)
            if ended is not None:
                print(lines.read(), end="", flush=True)
                return ended
            if serving:
                print(f"Running in the background (pid {process.pid}); stop it with `{down}`")
                return 0
            time.sleep(POLL_S)
