"""`demo`: what it leaves in its state directory, with a stand-in for the fleet."""

from pathlib import Path

import pytest

from inferfleet_cli import demo
from inferfleet_cli.errors import CliError
from inferfleet_cli.main import main
from inferfleet_cli.supervisor.state_dir import StateDir


@pytest.fixture
def run_demo(tmp_path, monkeypatch):
    """(error or None) → status of a demo whose fleet ends with it; its state is tmp_path/state."""

    def run(error):
        async def with_fleet(options, _body):
            state = StateDir(options.state_dir)
            state.claim()
            state.log_file("engine-1").write_text("words")
            state.release()
            if error is not None:
                raise error
            return 0

        monkeypatch.setattr(demo, "with_fleet", with_fleet)
        where = f"--state-dir={tmp_path / 'state'}"
        return main(["demo", "--set=engine.simulate=yes", where])

    return run


def test_a_good_run_leaves_nothing(tmp_path, run_demo):
    assert run_demo(None) == 0
    assert list(tmp_path.iterdir()) == []


def test_what_is_not_its_own_stays(tmp_path, run_demo):
    other = tmp_path / "state" / "demo" / "notes"
    other.parent.mkdir(parents=True)
    other.touch()
    assert run_demo(None) == 0
    assert list(other.parent.iterdir()) == [other]


def test_a_failed_run_keeps_its_logs_and_says_where(tmp_path, run_demo, capsys):
    assert run_demo(CliError("engine-1 ended")) == 1
    logs = tmp_path / "state" / "demo" / "logs"
    assert capsys.readouterr().err == f"inferfleet: engine-1 ended\nlogs: {logs}\n"
    assert (logs / "engine-1.log").read_text() == "words"


def test_a_tiny_model_is_there_for_the_run_and_gone_after(tmp_path, monkeypatch):
    found = []

    def files(folder):
        return [path.name for path in Path(folder).iterdir()]

    async def with_fleet(options, _body):
        found.append((options.model, files(options.model)))
        return 0

    monkeypatch.setattr(demo, "with_fleet", with_fleet)
    where = f"--state-dir={tmp_path / 'state'}"
    assert main(["demo", "--model=tiny:qwen3-moe:bfloat16", where]) == 0
    ((folder, names),) = found
    assert Path(folder).name == "tiny-qwen3-moe-bfloat16"
    assert "model.safetensors" in names
    assert list(tmp_path.iterdir()) == []
