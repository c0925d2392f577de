"""`up` before anything runs: what is refused, and that nothing but the reason is said."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from inferfleet.cli.main import main
from inferfleet.cli.supervisor import state_dir
from inferfleet.cli.supervisor.state_dir import StateDir


@pytest.mark.parametrize("flags", [[], ["--detach"]])
def test_a_second_fleet_in_a_directory_says_only_why_not(tmp_path, capsys, flags):
    state = StateDir(tmp_path)
    state.claim()
    state.log_file("supervisor").write_text("of the first\n")
    try:
        assert main(["up", *flags, "--state-dir", str(tmp_path)]) == 1
    finally:
        state.release()
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"inferfleet: a fleet already runs in {tmp_path}: stop it with")
    assert state.log_file("supervisor").read_text() == "of the first\n"


@pytest.mark.parametrize("flags", [[], ["--detach"]])
def test_a_state_directory_that_is_a_file_says_only_that(tmp_path, capsys, flags):
    file = tmp_path / "file"
    file.touch()
    assert main(["up", *flags, "--state-dir", str(file)]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"inferfleet: cannot use the state directory {file}: ")
    assert main(["down", "--state-dir", str(file)]) == 0


def test_hints_name_a_state_directory_that_is_not_the_default():
    assert state_dir.flag(Path(".inferfleet")) == ""
    assert state_dir.flag(Path("my fleet")) == " --state-dir 'my fleet'"


def test_the_detached_process_is_told_so_and_how_to_stop_it(tmp_path):
    """A stand-in for the interpreter that claims the directory, says its arguments and stays."""
    program = tmp_path / "python"
    program.write_text(
        f"#!{sys.executable}\n"
        "import sys, time\nfrom pathlib import Path\n"
        "from inferfleet.cli.supervisor.state_dir import StateDir\n"
        "import os\nprint(sys.argv[3:], flush=True)\n"
        "s = StateDir(Path(sys.argv[-2])); s.claim()\n"
        "s.write_record({'supervisor_pid': os.getpid()})\n"
        "time.sleep(600)\n"
    )
    program.chmod(0o755)
    state = tmp_path / "state"
    arguments = ["up", "--det", "--state-dir", str(state)]
    code = (
        "import sys; from inferfleet.cli.main import main\n"
        f"sys.executable = {str(program)!r}; sys.exit(main())"
    )
    command = [sys.executable, "-c", code, *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=50)
    finally:
        pid = StateDir(state).owner_pid()
        if pid is not None:
            os.kill(pid, signal.SIGKILL)
    assert done.returncode == 0, done.stderr
    assert str([*arguments, "--in-background"]) in done.stdout
    assert f"`inferfleet down --state-dir {state}` stops it" in done.stdout
