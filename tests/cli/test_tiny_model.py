"""`tiny-model`: what it writes and prints, and what it refuses in one line."""

import json

import pytest

from inferfleet_cli.main import main
from inferfleet_cli.supervisor.state_dir import StateDir


def test_it_writes_a_folder_and_lists_its_files(tmp_path, capsys):
    folder = tmp_path / "m"
    arguments = ["--set", "num_hidden_layers=1", "--format", "bfloat16", "--seed", "3"]
    assert main(["tiny-model", "qwen3-moe", "--out", str(folder), *arguments]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines] == sorted(map(str, folder.iterdir()))
    config = json.loads((folder / "config.json").read_text())
    assert (config["num_hidden_layers"], config["model_type"]) == (1, "qwen3_moe")


def test_without_an_architecture_it_lists_them(capsys):
    assert main(["tiny-model"]) == 0
    architectures, formats = capsys.readouterr().out.splitlines()
    assert "qwen3_moe" in architectures
    assert "fp8" in formats


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["tiny-model", "bert", "--out", "m"], "architecture 'bert' is none of deepseek_v3"),
        (["tiny-model", "llama", "--out", "m", "--format", "x"], "format 'x' is none of"),
        (["up", "--model", "tiny:bert"], "architecture 'bert' is none of deepseek_v3"),
        (["up", "--model", "tiny:llama:x"], "format 'x' is none of"),
    ],
    ids=" ".join,
)
def test_what_does_not_exist_is_refused_by_name(arguments, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    assert capsys.readouterr().err.startswith(f"inferfleet: {message}")
    assert not list(tmp_path.rglob("config.json"))


def test_a_change_without_a_json_value_is_refused(capsys):
    with pytest.raises(SystemExit):
        main(["tiny-model", "llama", "--set", "hidden_size"])
    assert "expected KEY=VALUE with a JSON value, got 'hidden_size'" in capsys.readouterr().err


def test_a_tiny_model_of_a_running_fleet_is_left_alone(tmp_path, capsys):
    state = StateDir(tmp_path)
    state.claim()
    try:
        assert main(["up", "--model=tiny:llama", "--state-dir", str(tmp_path)]) == 1
    finally:
        state.release()
    assert "a fleet already runs" in capsys.readouterr().err
    assert not state.tiny_models.exists()
