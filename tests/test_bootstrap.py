"""scripts/bootstrap.py: what it decides, says and refuses (its whole run is `make run`)."""

import importlib.util
import json
import subprocess
import sys
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


def test_a_gpu_takes_the_cuda_lock_without_asking(bootstrap, monkeypatch):
    monkeypatch.setattr(bootstrap.subprocess, "run", answer_of_pip([], returncode=1))
    assert bootstrap._torch_plan(gpu=True) == "cuda"


@pytest.mark.parametrize(
    ("names", "plan"),
    [(["torch", "sympy"], "plain"), (["torch", "nvidia-cublas", "nvidia-cudnn-cu13"], "uv")],
)
def test_without_a_gpu_pip_is_asked_what_plain_torch_would_be(bootstrap, monkeypatch, names, plan):
    monkeypatch.setattr(bootstrap.sys, "platform", "linux")
    monkeypatch.setattr(bootstrap.subprocess, "run", answer_of_pip(names))
    assert bootstrap._torch_plan(gpu=False) == plan


def test_on_a_mac_plain_torch_is_the_cpu_build(bootstrap, monkeypatch):
    monkeypatch.setattr(bootstrap.sys, "platform", "darwin")
    assert bootstrap._torch_plan(gpu=False) == "plain"


def test_when_uv_fails_the_plain_package_is_taken_and_its_size_said(bootstrap, monkeypatch, capsys):
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
    said = int(capsys.readouterr().out.split()[3])
    locks = sum(bootstrap._fetch_mb(f"{name}.lock") for name in ("cpu", "dev", "model"))
    assert said == locks + bootstrap.TORCH_CPU_MB


def test_the_stamp_changes_with_the_locks_the_device_and_the_place(bootstrap, monkeypatch):
    stamps = {bootstrap._stamp("run", False), bootstrap._stamp("run", True)}
    stamps.add(bootstrap._stamp("dev", False))
    monkeypatch.setattr(bootstrap, "VENV", Path("/elsewhere"))
    stamps.add(bootstrap._stamp("run", False))
    monkeypatch.setattr(bootstrap.sys, "version_info", (3, 12, 1))
    stamps.add(bootstrap._stamp("run", False))
    assert len(stamps) == 5


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
        ("ERROR: THESE PACKAGES DO NOT MATCH THE HASHES", "another file than the one locked"),
        ("OSError: [Errno 28] No space left on device", "free some disk space"),
        ("boom", "run the same again"),
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


def test_the_published_wheel_holds_the_client_alone(tmp_path):
    import zipfile

    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("inferfleet-*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0].split("-")[0] for name in names} == {"inferfleet"}
    metadata = next(name for name in names if name.endswith("METADATA"))
    with zipfile.ZipFile(wheel) as archive:
        asked = [
            line.split(":")[1].strip()
            for line in archive.read(metadata).decode().splitlines()
            if line.startswith("Requires-Dist") and "extra ==" not in line
        ]
    assert sorted(name.split(">")[0].split("<")[0] for name in asked) == [
        "googleapis-common-protos",
        "grpcio",
        "protobuf",
    ]
