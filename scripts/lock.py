"""Resolve pyproject.toml into requirements/*.lock; run it after a change of dependencies.

    cpu.lock   what runs the fleet, without torch: its CPU build differs from host to host, so it
               can have no digest (scripts/bootstrap.py chooses it)
    cuda.lock  the same with torch's CUDA build and the libraries that it asks for
    dev.lock   what `make check` and `make test` add to either

One resolution holds for Python 3.11 to 3.13 on Linux and macOS (environment markers), every
package has its digests, and pip installs with --no-deps: nothing is resolved on a user's machine.
"""

import os
import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "requirements"
UV = "uv==0.13.9"
CUDA_PREFIXES = ("torch", "nvidia-", "cuda-")
BASE_PLATFORM = re.compile(
    r"-(cp311-cp311|cp3\d+-abi3|py3-none|py2\.py3-none)-(any|manylinux.*x86_64)"
)

Pins = dict[str, list[str]]
"""Name → the entries of a package; more than one where versions differ by Python or platform."""


def main() -> int:
    with tempfile.TemporaryDirectory() as scratch:
        uv = _install_uv(Path(scratch))
        dev = _compile(uv, "dev", Path(scratch))
        run = _compile(uv, "local", Path(scratch), constraints=Path(scratch) / "dev.txt")
        sizes = _sizes(uv, Path(scratch))
    cpu = {name: entry for name, entry in run.items() if not name.startswith(CUDA_PREFIXES)}
    added = {name: entry for name, entry in dev.items() if name not in run}
    _write("cpu.lock", "Runs the fleet, without torch: see scripts/bootstrap.py.", cpu, sizes)
    _write("cuda.lock", "Runs the fleet on a GPU: torch's CUDA build included.", run, sizes)
    _write("dev.lock", "What checks and tests need besides.", added, sizes)
    return 0


def _install_uv(scratch: Path) -> list[str]:
    target = scratch / "uv"
    command = [sys.executable, "-m", "pip", "install", "-q", "--target", str(target), UV]
    subprocess.run(command, check=True)
    return [str(target / "bin" / "uv")]


def _uv(uv: list[str], arguments: list[str]) -> None:
    environ = dict(os.environ)
    index = subprocess.run(
        [sys.executable, "-m", "pip", "config", "get", "global.index-url"],
        capture_output=True,
        text=True,
    ).stdout.strip()
    if index:  # uv does not read pip's configuration
        environ.setdefault("UV_DEFAULT_INDEX", index)
    subprocess.run([*uv, "pip", "compile", "-q", *arguments], cwd=ROOT, check=True, env=environ)


def _compile(uv: list[str], extra: str, scratch: Path, constraints: Path | None = None) -> Pins:
    out = scratch / f"{extra}.txt"
    arguments = ["--universal", "--python-version", "3.11", "--generate-hashes", "--no-annotate"]
    arguments += ["--no-header", "--extra", extra, "-o", str(out)]
    if constraints:
        arguments += ["-c", str(constraints)]
    _uv(uv, [*arguments, "pyproject.toml", "requirements/build.in"])
    pins: Pins = {}
    for entry in re.split(r"\n(?=\S)", out.read_text().strip()):
        name = entry.split("==")[0].strip()
        pins.setdefault(name, []).append(entry)
    return pins


def _sizes(uv: list[str], scratch: Path) -> dict[str, int]:
    """Bytes to fetch per package on Linux x86-64 with Python 3.11, for the announcement."""
    out = scratch / "pylock.toml"
    arguments = ["--universal", "--python-version", "3.11", "--extra", "dev", "-o", str(out)]
    _uv(uv, [*arguments, "--format", "pylock.toml", "pyproject.toml", "requirements/build.in"])
    packages = tomllib.loads(out.read_text())["packages"]
    return {package["name"]: _size(package) for package in packages}


def _size(package: dict[str, Any]) -> int:
    for wheel in package.get("wheels", ()):
        if BASE_PLATFORM.search(wheel.get("name") or wheel["url"].rsplit("/", 1)[-1]):
            return int(wheel.get("size", 0))
    return int(package.get("sdist", {}).get("size", 0))


def _write(name: str, purpose: str, pins: Pins, sizes: dict[str, int]) -> None:
    megabytes = round(sum(sizes.get(package, 0) for package in pins) / 1e6)
    head = f"# {purpose}\n# Made by scripts/lock.py; do not edit.\n# fetch-mb: {megabytes}\n"
    entries = [entry for package in sorted(pins) for entry in pins[package]]
    (OUT / name).write_text(head + "\n".join(entries) + "\n")
    print(f"requirements/{name}: {len(pins)} packages, {megabytes} MB")


if __name__ == "__main__":
    sys.exit(main())
