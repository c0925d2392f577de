"""scripts/bootstrap.py: its decisions, messages and refusals (`make run` is a whole run)."""

import importlib.util
import json
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def bootstrap(tmp_path, monkeypatch):
    spec = importlib.util.spec_from_file_location("bootstrap", ROOT / "scripts" / "bootstrap.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "VENV", tmp_path / "venv")
    monkeypatch.setattr(module, "PYTHON", tmp_path / "venv" / "bin" / "python")
    return module


def answer_of_pip(names, returncode=0, stderr=""):
    report = json.dumps({"install": [{"metadata": {"name": name}} for name in names]})
    return lambda *_, **__: subprocess.CompletedProcess([], returncode, report, stderr)


def test_with_a_gpu_the_cuda_lock_is_used_without_a_search(bootstrap, monkeypatch):
    monkeypatch.setattr(bootstrap.subprocess, "run", answer_of_pip([], returncode=1))
    assert bootstrap._torch_plan(gpu=True) == "cuda"


@pytest.mark.parametrize(
    ("names", "plan"),
    [(["torch", "sympy"], "plain"), (["torch", "nvidia-cublas", "nvidia-cudnn-cu13"], "uv")],
)
def test_without_a_gpu_pip_decides_how_torch_is_installed(bootstrap, monkeypatch, names, plan):
    monkeypatch.setattr(bootstrap.sys, "platform", "linux")
    monkeypatch.setattr(bootstrap.subprocess, "run", answer_of_pip(names))
    assert bootstrap._torch_plan(gpu=False) == plan


def test_on_a_mac_plain_torch_is_the_cpu_build(bootstrap, monkeypatch):
    monkeypatch.setattr(bootstrap.sys, "platform", "darwin")
    assert bootstrap._torch_plan(gpu=False) == "plain"


def test_when_uv_fails_the_plain_package_is_installed_and_its_size_shown(
    bootstrap, monkeypatch, capsys
):
    locks = []

    def fail(*_):
        raise bootstrap.BootstrapError("torch, CPU build failed: no route; check the network")

    monkeypatch.setattr(bootstrap, "_pip", lambda *_: None)
    monkeypatch.setattr(bootstrap, "_step", fail)
    monkeypatch.setattr(bootstrap, "_install_lock", lambda lock, _: locks.append(lock))
    bootstrap._install_torch("uv")
    assert locks == ["cuda.lock"]
    out = capsys.readouterr().out
    assert "no route" in out
    assert "MB more" in out


def test_the_announcement_adds_up_the_locks(bootstrap, capsys):
    bootstrap._announce("dev", "plain")
    announced_mb = int(capsys.readouterr().out.split()[3])
    locks = sum(bootstrap._fetch_mb(f"{name}.lock") for name in ("cpu", "dev", "model"))
    assert announced_mb == locks + bootstrap.TORCH_CPU_MB


def test_the_stamp_changes_with_the_locks_the_device_and_the_place(bootstrap, monkeypatch):
    stamps = {bootstrap._stamp("run", False), bootstrap._stamp("run", True)}
    stamps.add(bootstrap._stamp("dev", False))
    monkeypatch.setattr(bootstrap, "VENV", Path("/elsewhere"))
    stamps.add(bootstrap._stamp("run", False))
    monkeypatch.setattr(bootstrap.sys, "version_info", (3, 12, 1))
    stamps.add(bootstrap._stamp("run", False))
    assert len(stamps) == 5


@pytest.mark.parametrize("folder", [".", "inferfleet_cli"])
def test_the_stamp_changes_with_either_project_but_not_with_tool_settings(
    bootstrap, monkeypatch, tmp_path, folder
):
    for name in (".", "inferfleet_cli"):
        (tmp_path / name).mkdir(exist_ok=True)
        text = (ROOT / name / "pyproject.toml").read_text()
        (tmp_path / name / "pyproject.toml").write_text(text)
    monkeypatch.setattr(bootstrap, "ROOT", tmp_path)
    before = bootstrap._stamp("run", False)
    project = tmp_path / folder / "pyproject.toml"
    project.write_text(project.read_text() + '\n[tool.other]\nkey = "value"\n')
    assert bootstrap._stamp("run", False) == before
    project.write_text(project.read_text().replace('version = "', 'version = "1', 1))
    assert bootstrap._stamp("run", False) != before


def test_both_distributions_and_the_package_have_one_version():
    import tomllib

    import inferfleet

    projects = [ROOT / "pyproject.toml", ROOT / "inferfleet_cli" / "pyproject.toml"]
    versions = [tomllib.loads(path.read_text())["project"]["version"] for path in projects]
    assert versions == [inferfleet.__version__] * 2


def test_a_finished_installation_is_not_looked_at_again(bootstrap, monkeypatch):
    bootstrap.PYTHON.parent.mkdir(parents=True)
    bootstrap.PYTHON.touch()
    gpu = bootstrap._has_gpu()
    stamp = {"stamp": bootstrap._stamp("dev", gpu)}
    (bootstrap.VENV / ".bootstrap-dev.json").write_text(json.dumps(stamp))

    def refuse(*_, **__):
        raise AssertionError("a process was started")

    monkeypatch.setattr(bootstrap, "_has_gpu", lambda: gpu)
    monkeypatch.setattr(bootstrap.subprocess, "Popen", refuse)
    monkeypatch.setattr(bootstrap.subprocess, "run", refuse)
    bootstrap._prepare("dev")
    bootstrap._prepare("run")  # the larger installation holds the smaller


@pytest.mark.parametrize(
    ("output", "words"),
    [
        ("ERROR: Connection timed out", "check the network"),
        ("ERROR: THESE PACKAGES DO NOT MATCH THE HASHES", "a file other than the locked one"),
        ("OSError: [Errno 28] No space left on device", "free some disk space"),
        ("boom", "run the same command again"),
    ],
)
def test_a_failed_step_says_what_to_do_in_one_line(bootstrap, output, words):
    line = bootstrap._advice("packages", f"noise\n{output}\n")
    assert words in line
    assert "\n" not in line


def test_an_unknown_python_is_refused_with_advice(bootstrap, monkeypatch):
    monkeypatch.setattr(bootstrap.sys, "version_info", (3, 9, 1))
    monkeypatch.setattr(bootstrap.shutil, "which", lambda _: None)
    with pytest.raises(bootstrap.BootstrapError, match=r"install Python 3\.11, 3.12 or 3.13"):
        bootstrap._right_python()


def test_make_help_lists_the_targets():
    done = subprocess.run(
        ["make", "-C", str(ROOT), "--no-print-directory", "help"],
        capture_output=True,
        text=True,
        check=True,
    )
    for target in ("run", "up", "check", "test", "test-tools", "verify", "gpu"):
        assert f"make {target} " in done.stdout


def test_a_missing_python_is_one_line():
    done = subprocess.run(
        ["make", "-C", str(ROOT), "venv", "PYTHON=no-such-python"], capture_output=True, text=True
    )
    assert done.returncode != 0
    assert "no-such-python is missing: install Python" in done.stdout
