"""`up` before anything runs: what it refuses, and that it prints the reason only."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from inferfleet_cli.main import main
from inferfleet_cli.supervisor import state_dir
from inferfleet_cli.supervisor.state_dir import StateDir

NO_MODEL = ("--set", "engine.simulate=yes")


@pytest.mark.parametrize("flags", [[], ["--detach"]])
def test_a_second_fleet_in_a_directory_says_only_why_not(tmp_path, capsys, flags):
    state = StateDir(tmp_path)
    state.claim()
    state.log_file("supervisor").write_text("of the first\n")
    try:
        assert main(["up", *flags, *NO_MODEL, "--state-dir", str(tmp_path)]) == 1
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
    assert main(["up", *flags, *NO_MODEL, "--state-dir", str(file)]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"inferfleet: cannot use the state directory {file}: ")
    assert main(["down", "--state-dir", str(file)]) == 0


def test_hints_name_a_state_directory_that_is_not_the_default():
    assert state_dir.flag(Path(".inferfleet")) == ""
    assert state_dir.flag(Path("my fleet")) == " --state-dir 'my fleet'"


def test_detach_prints_how_to_stop_the_fleet(tmp_path):
    """A stand-in for the interpreter that claims the directory, says its arguments and stays."""
    program = tmp_path / "python"
    program.write_text(
        f"#!{sys.executable}\n"
        "import sys, time\nfrom pathlib import Path\n"
        "from inferfleet_cli.supervisor.state_dir import StateDir\n"
        "import os\nprint(sys.argv[3:], flush=True)\n"
        "s = StateDir(Path(sys.argv[-2])); s.claim()\n"
        "s.write_record({'supervisor_pid': os.getpid()})\n"
        "time.sleep(600)\n"
    )
    program.chmod(0o755)
    state = tmp_path / "state"
    arguments = ["up", "--det", *NO_MODEL, "--state-dir", str(state)]
    code = (
        "import sys; from inferfleet_cli.main import main\n"
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
    assert f"stop it with `inferfleet down --state-dir {state}`" in done.stdout


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (
            ["--model", "/no/such"],
            "engine: model '/no/such': neither a file, a folder nor a known name",
        ),
        (["--model", __file__], "test_up.py: not a GGUF file"),
        (["--dtype", "float8"], "engine: dtype: must be one of float32, bfloat16, float16, int8"),
        (
            ["--set", "engine.threads=-1"],
            "engine: threads: must be at least 0, got '-1' (from flag",
        ),
        (["--set", "balancer.policy=foo"], "balancer: policy: 'foo' is none of least_time, "),
        (["--set", "engine.nope=1"], "--set engine.nope=1: engine.nope: no such key\n"),
        (["--set", "engine-2.thraeds=1"], "engine-2.thraeds: no such key; did you mean threads?\n"),
        (["--set", "engin.threads=1"], "engin: no such service; did you mean engine?\n"),
        (["--set", "engine-3.threads=1"], "engine-3: no such service; did you mean engine-"),
        (["--set", "engine.deterministic=so"], "engine: deterministic: expected true or false"),
        (["--set", "gateway.api_keys_file=/no/such"], "gateway: api_keys_file: cannot read /no/s"),
    ],
)
def test_what_a_service_would_refuse_is_refused_before_anything_starts(
    tmp_path, capsys, flags, words
):
    state = tmp_path / "state"
    assert main(["up", "--state-dir", str(state), *flags]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("inferfleet: ")
    assert words in err
    assert len(err.splitlines()) == 1
    assert not state.exists()


def test_a_switch_goes_through_set_and_the_checks_load_no_tensors(tmp_path):
    code = (
        "import sys; from pathlib import Path\n"
        "from inferfleet_cli.supervisor import options, preflight\n"
        "settings = (('engine', 'deterministic', 'true'), ('engine', 'simulate', 'yes'))\n"
        "preflight.check(options.Options(Path('x'), settings=settings), Path('.'))\n"
        "sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path
    )
    assert (done.returncode, done.stderr) == (0, "")
