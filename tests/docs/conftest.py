"""One small fleet for all console blocks that talk to a running fleet."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.docs.console import TIMEOUT_S

ROOT = Path(__file__).resolve().parents[2]
NAMES = ("README.md", "docs", "examples", "helm", "protos", "scripts", "services", "benchmarks")


@dataclass(frozen=True)
class Workplace:
    """A folder that looks like a checkout, with its own `.inferfleet`."""

    folder: Path
    environment: dict[str, str]

    def run(self, *command: str) -> str:
        done = subprocess.run(
            command,
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


def make_workplace(folder: Path) -> Workplace:
    folder.mkdir(parents=True, exist_ok=True)
    for name in NAMES:
        (folder / name).symlink_to(ROOT / name)
    (folder / ".venv").symlink_to(sys.prefix)
    path = f"{Path(sys.prefix) / 'bin'}{os.pathsep}{os.environ['PATH']}"
    return Workplace(folder, {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT)})


@pytest.fixture
def workplace(tmp_path: Path) -> Iterator[Workplace]:
    """A checkout of the test's own; a fleet that runs in it afterwards is stopped."""
    place = make_workplace(tmp_path)
    yield place
    if (tmp_path / ".inferfleet" / "fleet.json").exists():
        place.run("inferfleet", "down", "--now")


@pytest.fixture(scope="module")
def fleet_place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workplace]:
    """A checkout in which a fleet of one engine with the small default model runs."""
    place = make_workplace(tmp_path_factory.mktemp("checkout"))
    ports = ("--port=0", "--http-port=0", "--set=engine.threads=1")
    place.run("inferfleet", "up", "--detach", f"--end-with={os.getpid()}", "--engines=1", *ports)
    yield place
    place.run("inferfleet", "down", "--now")


@pytest.fixture(scope="module")
def fleet_values(fleet_place: Workplace) -> dict[str, str]:
    """What the placeholders and default addresses of the pages are for this fleet."""
    record = json.loads((fleet_place.folder / ".inferfleet" / "fleet.json").read_text())
    status = json.loads(fleet_place.run("inferfleet", "status", "--json"))
    gateway = {one["name"]: one for one in status["services"]}["gateway"]
    answer = ("inferfleet", "generate", "Hello", "--max-tokens=4", "--seed=1", "--json")
    request_id = json.loads(fleet_place.run(*answer))["request_id"]
    _wait_for_trace(fleet_place, request_id)
    return {
        "127.0.0.1:50051": record["gateway"],
        "127.0.0.1:8080": record["http"].removeprefix("http://"),
        "ADMIN_ADDRESS": record["admin"],
        "METRICS_ADDRESS": gateway["metrics_address"],
        "PID": str(gateway["pid"]),
        "REQUEST_ID": request_id,
    }


def _wait_for_trace(place: Workplace, request_id: str) -> None:
    """A trace arrives a moment after its request."""
    deadline = time.monotonic() + 30
    while True:
        try:
            place.run("inferfleet", "trace", request_id)
        except AssertionError:
            assert time.monotonic() < deadline, f"no trace of {request_id} after 30 s"
            time.sleep(0.2)
        else:
            return
