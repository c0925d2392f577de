"""The state directory: one supervisor at a time, a private token, no stale record."""

import os
import stat
import subprocess
import sys

import pytest

from inferfleet_cli.errors import CliError
from inferfleet_cli.supervisor.state_dir import StateDir, require_record


def test_the_token_is_new_each_time_and_private(tmp_path):
    state = StateDir(tmp_path)
    state.claim()
    first = state.token()
    assert stat.S_IMODE(state.token_file.stat().st_mode) == 0o600
    assert len(first) >= 32
    state.release()
    assert not state.token_file.exists()
    state.claim()
    assert state.token() != first
    state.release()


def test_only_the_user_may_enter_the_directory(tmp_path):
    root = tmp_path / "outer" / "state"
    StateDir(root).make()
    assert stat.S_IMODE(root.stat().st_mode) == 0o700
    root.chmod(0o755)
    StateDir(root).make()
    assert stat.S_IMODE(root.stat().st_mode) == 0o700


def test_a_second_supervisor_is_refused_with_advice(tmp_path):
    state = StateDir(tmp_path)
    state.claim()
    state.write_record({"gateway": "here"})
    loser = StateDir(tmp_path)
    with pytest.raises(CliError, match="inferfleet down --state-dir"):
        loser.claim()
    loser.release()
    assert state.read_record() == {"gateway": "here"}
    assert state.token()
    assert StateDir(tmp_path).owner_pid() == os.getpid()
    state.release()
    assert StateDir(tmp_path).owner_pid() is None
    second = StateDir(tmp_path)
    second.claim()
    second.release()


def test_a_record_of_a_dead_supervisor_does_not_count(tmp_path):
    code = (
        "import sys, os; from pathlib import Path\n"
        "from inferfleet_cli.supervisor.state_dir import StateDir\n"
        "s = StateDir(Path(sys.argv[1])); s.claim(); s.write_record({'gateway': 'x'}); os._exit(9)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False)
    assert (tmp_path / "fleet.json").exists()
    assert StateDir(tmp_path).read_record() is None
    with pytest.raises(CliError, match="no fleet runs"):
        require_record(tmp_path)


def test_an_unusable_directory_is_said(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CliError, match="cannot use the state directory"):
        StateDir(tmp_path / "file" / "state").claim()
