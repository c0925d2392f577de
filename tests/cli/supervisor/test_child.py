"""One child: ready, restarted with back-off, stopped with all it started."""

import asyncio
import json
import os
import signal
import time

import pytest

from inferfleet_cli.errors import CliError
from inferfleet_cli.supervisor.child import Child, restart_delay_s
from inferfleet_cli.supervisor.options import ServicePlan

PATIENCE_S = 20.0


def alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


async def until(condition):
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        await asyncio.sleep(0.02)


@pytest.fixture
def make_child(tmp_path, service_argv):
    children = []

    def make(mode, **more):
        ready, events = tmp_path / "ready.json", []
        child = Child(
            ServicePlan("thing", service_argv(ready, mode)),
            log_file=tmp_path / "thing.log",
            ready_file=ready,
            cwd=tmp_path,
            on_event=events.append,
            **more,
        )
        children.append(child)
        return child, ready, events

    yield make
    for child in children:
        child.kill()


def test_the_first_restart_is_at_once_and_the_back_off_doubles_and_is_bounded():
    delays = [restart_delay_s(failures) for failures in range(1, 12)]
    assert delays[:5] == [0.0, 0.5, 1.0, 2.0, 4.0]
    assert max(delays) == 30.0


async def test_a_stopped_child_takes_its_helpers_with_it(make_child):
    child, ready, _ = make_child("steady")
    await child.start()
    await child.wait_ready()
    record = json.loads(ready.read_text())
    status = child.status()
    assert (status.state, status.pid, status.address) == ("ready", record["pid"], "127.0.0.1:1")
    await child.stop(10.0)
    await until(lambda: not alive(record["pid"]) and not alive(record["helper"]))
    assert child.status().state == "stopped"


async def test_a_killed_child_comes_back(make_child):
    child, ready, events = make_child("steady")
    await child.start()
    await child.wait_ready()
    first = json.loads(ready.read_text())
    os.kill(first["pid"], signal.SIGKILL)
    await until(lambda: child.status().restarts == 1 and child.status().state == "ready")
    assert child.status().pid != first["pid"]
    assert not alive(first["helper"])
    assert events == ["thing ended with signal 9; starting it again now", "thing is back"]
    await child.stop(10.0)


async def test_a_child_that_ignores_sigterm_is_killed_after_the_grace(make_child):
    child, ready, _ = make_child("deaf")
    await child.start()
    await child.wait_ready()
    pid = json.loads(ready.read_text())["pid"]
    await child.stop(0.2)
    assert not alive(pid)


async def test_a_child_that_never_was_ready_is_not_tried_again(make_child):
    child, _, _ = make_child("refuse")
    await child.start()
    with pytest.raises(CliError, match=r"ended with status 2:\n.*bad: no such thing"):
        await child.wait_ready()


async def test_stopping_while_it_waits_for_a_restart_ends_the_wait(make_child):
    child, _, events = make_child("crash", delay_s=lambda _: 60.0)
    await child.start()
    await child.wait_ready()
    await until(lambda: events)
    assert events[0].endswith("starting it again in 60 s")
    await child.stop(5.0)
    assert child.status().restarts == 0


async def test_stopping_while_a_restart_begins_leaves_no_process(make_child, monkeypatch):
    child, _, _ = make_child("steady")
    await child.start()
    await child.wait_ready()
    started, begun = [], asyncio.Event()
    start = child._start_process

    async def start_slowly():
        begun.set()
        await asyncio.sleep(0.1)
        started.append(await start())
        return started[-1]

    monkeypatch.setattr(child, "_start_process", start_slowly)
    os.kill(child.status().pid, signal.SIGKILL)
    await asyncio.wait_for(begun.wait(), PATIENCE_S)
    await child.stop(5.0)
    assert [process.returncode for process in started] == [-signal.SIGKILL]
