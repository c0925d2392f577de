"""A spare takes the place of an engine that ended; who comes back stands by."""

import asyncio
import os
import signal
import time
from types import SimpleNamespace

from inferfleet_cli.supervisor.fleet import Fleet
from inferfleet_cli.supervisor.options import Options, service_names
from inferfleet_cli.supervisor.spares import Spares


class Engine:
    def __init__(self, name):
        self.name, self.state, self.restarts = name, "starting", 0

    def status(self):
        return SimpleNamespace(state=self.state, restarts=self.restarts)


def of(tmp_path, states, in_use):
    engines = [Engine(name) for name in states]
    for engine in engines:
        engine.state = states[engine.name]
    files = {name: tmp_path / name for name in states}
    lines = []
    made = Spares(engines, files, in_use, lines.append)
    by_name = {engine.name: engine for engine in engines}
    return made, by_name, lines, lambda: {n for n, f in files.items() if f.exists()}


def test_a_spare_takes_over_and_the_ended_one_stands_by(tmp_path):
    spares, engines, lines, in_use = of(tmp_path, dict.fromkeys("abc", "ready"), 2)
    spares.replace_ended()
    assert in_use() == {"a", "b"}
    engines["a"].state = "restarting"
    spares.replace_ended()
    assert in_use() == {"b", "c"}
    assert lines == ["c takes the place of a"]
    engines["a"].state = "ready"
    spares.replace_ended()
    assert in_use() == {"b", "c"}
    assert spares.is_spare("a")
    assert not spares.is_spare("c")
    assert not spares.is_spare("gateway")


def test_without_a_ready_spare_the_ended_engine_stays_in_use(tmp_path):
    states = {"a": "restarting", "b": "restarting", "c": "ready", "d": "starting"}
    spares, _, lines, in_use = of(tmp_path, states, 2)
    spares.replace_ended()
    assert in_use() == {"b", "c"}, "one spare for two"
    spares.replace_ended()
    assert len(lines) == 1


def test_an_engine_that_starts_again_at_once_is_replaced_too(tmp_path):
    states = {"a": "starting", "b": "starting", "c": "ready"}
    spares, engines, lines, in_use = of(tmp_path, states, 2)
    spares.replace_ended()
    assert in_use() == {"a", "b"}, "a first start"
    engines["b"].restarts = 1
    spares.replace_ended()
    assert in_use() == {"a", "c"}
    assert lines == ["c takes the place of b"]


async def test_a_killed_engine_of_a_fleet_is_replaced(tmp_path, stand_ins):
    options = Options(tmp_path / "state", engines=1, spare_engines=1, port=0, http_port=0)
    lines = []
    fleet = Fleet(options, lines.append, stand_ins())
    try:
        await fleet.start()
        before = {one["name"]: one for one in fleet.status()["services"]}
        assert [before[f"engine-{n}"]["state"] for n in (1, 2)] == ["ready", "spare"]
        os.kill(before["engine-1"]["pid"], signal.SIGKILL)
        deadline = time.monotonic() + 30
        while "engine-2 takes the place of engine-1" not in lines:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.02)
    finally:
        await fleet.stop()


def test_spares_are_engines_like_the_others(tmp_path):
    options = Options(tmp_path, engines=2, spare_engines=1)
    assert options.names == service_names(3)
