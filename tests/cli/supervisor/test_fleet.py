"""The supervisor as a whole: real stores, stand-in services, nothing left behind."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from inferfleet_cli.errors import CliError
from inferfleet_cli.supervisor.control import send_command
from inferfleet_cli.supervisor.fleet import Fleet
from inferfleet_cli.supervisor.options import Options
from inferfleet_cli.supervisor.state_dir import StateDir

pytestmark = pytest.mark.services
PATIENCE_S = 30.0


def processes_of(state_dir: Path) -> list[int]:
    """Processes whose command line names the state directory."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            command = (entry / "cmdline").read_bytes()
        except OSError:
            continue
        if str(state_dir).encode() in command and int(entry.name) != os.getpid():
            found.append(int(entry.name))
    return found


def until(condition):
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)


def options(tmp_path, **changes):
    return Options(state_dir=tmp_path / "state", port=0, http_port=0, **changes)


async def test_a_fleet_starts_answers_and_leaves_nothing(tmp_path, stand_ins):
    lines = []
    fleet = Fleet(options(tmp_path), lines.append, stand_ins())
    state_dir = tmp_path / "state"
    try:
        await fleet.start()
        status = await asyncio.to_thread(send_command, state_dir, "status")
        names = [service["name"] for service in status["services"]]
        assert names == ["redis", "etcd", "kvcache", "balancer", "engine-1", "engine-2", "gateway"]
        # The stand-ins are ready and listen nowhere: `status` calls each service.
        assert [service["state"] for service in fleet.status()["services"]] == ["ready"] * 7
        assert [service["state"] for service in status["services"]] == [
            *("ready", "ready"),
            *("not serving",) * 5,
        ]
        assert "UNAVAILABLE" in status["engines_error"]  # no balancer stands behind the stand-in
        assert sum("ready in" in line for line in lines) == len(names)
        with pytest.raises(CliError, match="no trace of nothing"):
            await asyncio.to_thread(send_command, state_dir, "trace", request_id="nothing")
        for service in status["services"]:
            os.kill(service["pid"], 0)  # it exists
    finally:
        await fleet.stop()
    assert processes_of(state_dir) == []
    assert StateDir(state_dir).read_record() is None
    assert not (state_dir / "fleet.token").exists()
    await fleet.stop()  # once more does no harm


async def test_a_store_that_was_named_is_not_started(tmp_path, stand_ins):
    settings = (("kvcache", "redis", "redis://127.0.0.1:1/0"),)
    fleet = Fleet(options(tmp_path, settings=settings, gateways=2), lambda _: None, stand_ins())
    try:
        await fleet.start()
        names = [service["name"] for service in fleet.status()["services"]]
        assert "redis" not in names
        assert "etcd" in names
        assert names[-2:] == ["gateway-1", "gateway-2"]
    finally:
        await fleet.stop()


async def test_a_killed_store_comes_back_in_its_place(tmp_path, stand_ins):
    lines = []
    fleet = Fleet(options(tmp_path, engines=1), lines.append, stand_ins())
    try:
        await fleet.start()
        before = {service["name"]: service for service in fleet.status()["services"]}
        os.kill(before["redis"]["pid"], signal.SIGKILL)
        deadline = time.monotonic() + PATIENCE_S
        while "redis is back" not in lines:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.05)
        after = fleet.status()["services"][0]
        assert (after["state"], after["restarts"]) == ("ready", 1)
        assert after["address"] == before["redis"]["address"]
        assert after["pid"] != before["redis"]["pid"]
    finally:
        await fleet.stop()


async def test_a_service_that_refuses_its_start_ends_the_start_with_its_words(tmp_path, stand_ins):
    fleet = Fleet(options(tmp_path), lambda _: None, stand_ins(engine_2="refuse"))
    with pytest.raises(CliError, match=r"engine-2 ended with status 2:\n.*no such thing"):
        await fleet.start()
    await fleet.stop()
    assert processes_of(tmp_path / "state") == []


SUPERVISOR = """
import asyncio, pickle, sys
from inferfleet_cli.supervisor import options as o
from inferfleet_cli.up import with_fleet
from inferfleet_cli.supervisor import fleet as f
script, state, end_with = sys.argv[1:]
from pathlib import Path

def planner(options, at, token, ready):
    command = lambda path: (sys.executable, "-S", script, str(path), "steady")
    return [o.ServicePlan(name, command(path)) for name, path in ready.items()]

async def body(fleet):
    print("UP", flush=True)
    await asyncio.Event().wait()

f.Fleet.__init__.__defaults__ = (planner,)
options = o.Options(state_dir=Path(state), port=0, http_port=0, engines=1)
sys.exit(asyncio.run(with_fleet(options, body, end_with=int(end_with) or None)))
"""


@contextlib.contextmanager
def supervised(script, state, end_with=0):
    """A supervisor in a process of its own, once its fleet is up."""
    command = [sys.executable, "-c", SUPERVISOR, script, str(state), str(end_with)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        until_up = [process.stdout.readline()]
        while until_up[-1] != "UP\n":
            assert until_up[-1], "".join(until_up)
            until_up.append(process.stdout.readline())
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_no_process_is_left_however_the_supervisor_ends(tmp_path, service_argv, signum):
    state = tmp_path / "state"
    with supervised(service_argv(tmp_path, "")[2], state) as process:
        record = json.loads((state / "fleet.json").read_text())
        assert record["supervisor_pid"] == process.pid
        started = processes_of(state)
        assert len(started) >= 6
        process.send_signal(signum)
        process.wait(PATIENCE_S)
        until(lambda: not [pid for pid in processes_of(state) if pid in started])
        assert process.returncode == (-signum if signum is signal.SIGKILL else 0)
        assert StateDir(state).owner_pid() is None


def test_a_fleet_ends_with_the_process_that_it_was_tied_to(tmp_path, service_argv):
    state = tmp_path / "state"
    other = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"])
    try:
        with supervised(service_argv(tmp_path, "")[2], state, other.pid) as process:
            other.kill()
            assert process.wait(PATIENCE_S) == 0
            assert processes_of(state) == []
    finally:
        other.kill()
        other.wait()


def test_a_fleet_tied_to_a_process_that_is_gone_ends_at_once(tmp_path, service_argv):
    gone = subprocess.Popen([sys.executable, "-S", "-c", ""])
    gone.wait()
    command = [sys.executable, "-c", SUPERVISOR, service_argv(tmp_path, "")[2]]
    done = subprocess.run(
        [*command, str(tmp_path / "state"), str(gone.pid)], timeout=PATIENCE_S, check=False
    )
    assert done.returncode == 0
    assert processes_of(tmp_path / "state") == []
