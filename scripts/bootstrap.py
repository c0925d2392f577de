"""Prepares .venv from the committed locks: `python3 scripts/bootstrap.py [--dev]`.

Uses the standard library only. It prints how much it will fetch, installs the locked versions,
checks every digest, and writes a stamp. A later start with the same stamp uses neither pip nor the
network.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = Path(os.environ.get("INFERFLEET_VENV", ROOT / ".venv"))
LOCKS = ROOT / "requirements"
PYTHON = VENV / "bin" / "python"
OLDEST, NEWEST = (3, 11), (3, 13)
TORCH = "torch==2.13.0"
UV = "uv==0.13.9"
TORCH_CPU_MB = 190
QUIET = ("-m", "pip", "--disable-pip-version-check", "--no-input", "-q")


class BootstrapError(Exception):
    """One line that says what failed and what the user can do."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dev", action="store_true", help="also what checks and tests need")
    arguments = parser.parse_args()
    try:
        _right_python()
        VENV.mkdir(parents=True, exist_ok=True)
        with (VENV / ".bootstrap.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            _prepare("dev" if arguments.dev else "run")
    except BootstrapError as error:
        print(f"bootstrap: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nbootstrap: interrupted; the next start continues", file=sys.stderr)
        return 130
    return 0


def _right_python() -> None:
    """Restart under a Python that the locks support, if this one is not supported."""
    if OLDEST <= sys.version_info[:2] <= NEWEST:
        return
    for minor in range(NEWEST[1], OLDEST[1] - 1, -1):
        other = shutil.which(f"python3.{minor}")
        if other and subprocess.call([other, "-c", ""], stderr=subprocess.DEVNULL) == 0:
            os.execv(other, [other, *sys.argv])
    raise BootstrapError(
        f"Python {platform.python_version()} is not supported: install Python 3.11, 3.12 or 3.13"
        " and name it, e.g. `make run PYTHON=/usr/bin/python3.12`"
    )


def _prepare(kind: str) -> None:
    gpu = _has_gpu()
    stamps = {name: _stamp(name, gpu) for name in ("run", "dev")}
    if _is_done(kind, stamps) or (kind == "run" and _is_done("dev", stamps)):
        return
    started = time.monotonic()
    if not _venv_works():
        _make_venv()
    torch_ready = _torch_version() is not None
    plan = "present" if torch_ready else _torch_plan(gpu)
    _announce(kind, plan)
    if plan == "cuda":
        _install_lock("cuda.lock", "packages and torch's CUDA build")
    else:
        _install_lock("cpu.lock", "packages")
        _install_torch(plan)
    if kind == "dev":
        _install_lock("dev.lock", "tools for checks and tests")
    _install_lock("model.lock", "the model, SmolLM2-135M-Instruct")
    # In this order: before 0.2.0 the script `inferfleet` belonged to the first distribution, whose
    # upgrade deletes it; the second distribution then installs it again.
    for part in (ROOT, ROOT / "inferfleet_cli"):
        what = "this checkout" if part == ROOT else "the inferfleet command"
        _pip(what, "install", "--no-deps", "--no-build-isolation", "-e", str(part))
    _step("kernels, compiled for this CPU", [str(PYTHON), "-m", "kernels.compiled"])
    (VENV / f".bootstrap-{kind}.json").write_text(json.dumps({"stamp": stamps[kind]}))
    print(f"Ready in {time.monotonic() - started:.0f} s: {VENV}", flush=True)


def _has_gpu() -> bool:
    if any(Path("/dev").glob("nvidia[0-9]*")):
        return True
    tool = shutil.which("nvidia-smi")
    return bool(tool) and subprocess.call([tool, "-L"], stdout=subprocess.DEVNULL) == 0


def _stamp(kind: str, gpu: bool) -> str:
    """Digest of all that decides what is installed: locks, projects, Python, place and device."""
    digest = hashlib.sha256(f"{VENV}|{sys.version_info[:2]}|{gpu}|{TORCH}".encode())
    names = ["cuda.lock" if gpu else "cpu.lock", "model.lock"]
    for name in [*names, "dev.lock"] if kind == "dev" else names:
        digest.update((LOCKS / name).read_bytes())
    # Only the parts of each pyproject.toml that an installation copies: tool settings change often.
    for folder in (ROOT, ROOT / "inferfleet_cli"):
        project = (folder / "pyproject.toml").read_text().split("[tool.")[0]
        project = project.split("[project.optional-dependencies]")[0]
        digest.update(re.sub(r"\s+", "", project).encode())
    return digest.hexdigest()


def _is_done(kind: str, stamps: dict[str, str]) -> bool:
    with contextlib.suppress(OSError, ValueError, KeyError):
        found = json.loads((VENV / f".bootstrap-{kind}.json").read_text())["stamp"]
        return bool(found == stamps[kind]) and PYTHON.exists()
    return False


def _venv_works() -> bool:
    if not PYTHON.exists():
        return False
    command = [str(PYTHON), "-c", "import pip, sys; print(sys.version_info[:2])"]
    shown = subprocess.run(command, capture_output=True, text=True)
    return shown.returncode == 0 and shown.stdout.strip() == str(tuple(sys.version_info[:2]))


def _make_venv() -> None:
    print(f"Making {VENV} with Python {platform.python_version()}", flush=True)
    stale = ["--clear"] if (VENV / "bin").exists() else []
    command = [sys.executable, "-m", "venv", *stale, str(VENV)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode or not PYTHON.exists():
        version = f"{sys.version_info[0]}.{sys.version_info[1]}"
        raise BootstrapError(
            f"cannot make a virtual environment: install python{version}-venv"
            f" (Debian, Ubuntu: apt install python{version}-venv) and run this again"
        )


def _torch_version() -> str | None:
    """The installed version of torch, e.g. "2.13.0+cpu"; None if it is not the locked one."""
    probe = "from importlib.metadata import version; print(version('torch'))"
    shown = subprocess.run([str(PYTHON), "-c", probe], capture_output=True, text=True)
    version = shown.stdout.strip()
    return version if version.split("+")[0] == TORCH.split("==")[1] else None


def _torch_plan(gpu: bool) -> str:
    """How to install torch: "cuda", "plain" (pip finds a CPU build) or "uv" (uv finds it)."""
    if gpu:
        return "cuda"
    if sys.platform == "darwin":
        return "plain"
    command = [str(PYTHON), *QUIET, "install", "--dry-run", "--ignore-installed", "--report", "-"]
    shown = subprocess.run([*command, TORCH], capture_output=True, text=True)
    if shown.returncode:
        raise BootstrapError(_advice("the search for torch", shown.stderr))
    names = [item["metadata"]["name"] for item in json.loads(shown.stdout)["install"]]
    return "uv" if any(name.startswith("nvidia-") for name in names) else "plain"


def _announce(kind: str, plan: str) -> None:
    names = ["cuda.lock" if plan == "cuda" else "cpu.lock", "model.lock"]
    names += ["dev.lock"] if kind == "dev" else []
    sizes = [_fetch_mb(name) for name in names]
    sizes += [TORCH_CPU_MB] if plan in ("plain", "uv") else []
    print(
        f"About to fetch {sum(sizes)} MB at most into {VENV} (pip does not fetch again what its"
        " cache holds)",
        flush=True,
    )


def _fetch_mb(lock: str) -> int:
    found = re.search(r"^# fetch-mb: (\d+)$", (LOCKS / lock).read_text(), re.MULTILINE)
    return int(found.group(1)) if found else 0


def _install_torch(plan: str) -> None:
    if plan == "plain":
        _pip("torch, CPU build", "install", "--no-deps", TORCH)
    elif plan == "uv":
        try:
            _pip("uv, which finds torch's CPU build", "install", "--no-deps", UV)
            uv = [str(VENV / "bin" / "uv"), "pip", "install", "-q", "--python", str(PYTHON)]
            _step("torch, CPU build", [*uv, "--no-deps", "--torch-backend=cpu", TORCH])
        except BootstrapError as error:
            print(f"  {error}")
            size = _fetch_mb("cuda.lock") - _fetch_mb("cpu.lock")
            print(f"  Installing the plain package instead, which contains CUDA: {size} MB more")
            _install_lock("cuda.lock", "torch's CUDA build")


def _install_lock(lock: str, what: str) -> None:
    file = str(LOCKS / lock)
    _pip(f"{what} ({_fetch_mb(lock)} MB)", "install", "--no-deps", "--require-hashes", "-r", file)


def _pip(what: str, *arguments: str) -> None:
    _step(what, [str(PYTHON), *QUIET, *arguments])


def _step(what: str, command: list[str]) -> None:
    """Run a command and show its progress as one line; print its output only if it fails."""
    started = time.monotonic()
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT
    )
    shown = False
    while True:
        try:
            output, _ = process.communicate(timeout=1 if sys.stdout.isatty() else 20)
            break
        except subprocess.TimeoutExpired:
            shown = sys.stdout.isatty()
            end = "\r" if shown else "\n"
            print(f"  {what} … {time.monotonic() - started:.0f} s", end=end, flush=True)
        except KeyboardInterrupt:
            process.terminate()
            raise
    if shown:
        print("\033[K", end="")
    if process.returncode:
        raise BootstrapError(_advice(what, output))
    print(f"  {what}: {time.monotonic() - started:.0f} s", flush=True)


def _advice(what: str, output: str) -> str:
    """The most informative line of a failed command's output, and what to do about it."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if line.lower().startswith("error")] or lines[-1:] or ["?"]
    text = output.lower()
    todo = "run the same command again; it continues where it stopped"
    if "hashes" in text or "hash mismatch" in text:
        todo = "the package index served a file other than the locked one: try without a mirror"
    elif "no space" in text:
        todo = "free some disk space and run this command again"
    elif "connection" in text or "timed out" in text or "resolve" in text:
        todo = "check the network (proxy, package index) and run this command again"
    return f"{what} failed: {errors[-1][:300]}; {todo}"


if __name__ == "__main__":
    sys.exit(main())
