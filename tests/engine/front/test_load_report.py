"""The load that an engine reports, and whether its core counts as stalled."""

import asyncio

from services.engine.contract.messages import Load
from services.engine.front.load_report import LoadState


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


class Engine:
    """A load state, its clock and the number of requests that the core holds."""

    def __init__(self, stall_s=5.0):
        self.clock = Clock()
        self.num_open = 0
        self.state = LoadState(
            "e", 7, stall_s=stall_s, count_open=lambda: self.num_open, clock=self.clock
        )

    async def round(self, load=None, *, num_open=1, placement_version=0):
        self.num_open = num_open
        await self.state.record_round(load or Load(), placement_version=placement_version)


async def test_an_idle_core_is_never_stalled():
    engine = Engine()
    engine.clock.now += 1000
    assert (engine.state.progress_age_s, engine.state.stalled) == (0.0, False)


async def test_work_without_a_round_is_a_stall_and_a_round_ends_it():
    engine = Engine()
    state = engine.state
    state.record_request()
    engine.clock.now += 4
    state.record_request()  # more work is no progress
    engine.clock.now += 2
    assert state.progress_age_s == 6
    assert state.stalled
    assert state.report().last_progress_age_s == 6
    await engine.round(num_open=1)
    assert not state.stalled
    await engine.round(num_open=0)
    engine.clock.now += 100
    assert not state.stalled


async def test_requests_sent_to_a_silent_core_are_reported_as_waiting():
    engine = Engine()
    await engine.round(Load(running_requests=1), num_open=3)
    fresh = engine.state.report()
    assert fresh.waiting_requests == 0, "the core's own numbers, as long as they are fresh"
    engine.clock.now += 1.5
    report = engine.state.report()
    assert (report.waiting_requests, report.running_requests) == (2, 1)
    await engine.round(Load(waiting_requests=1, running_requests=2), num_open=3)
    assert engine.state.report().waiting_requests == 1


async def test_an_engine_with_long_rounds_is_given_time():
    engine = Engine()
    engine.state.record_request()
    engine.clock.now += 3
    await engine.round()
    engine.clock.now += 29
    assert not engine.state.stalled
    engine.clock.now += 2
    assert engine.state.stalled


async def test_a_watcher_gets_a_report_at_once_at_changes_and_once_a_second():
    engine = Engine()
    watch = engine.state.watch()
    first = await anext(watch)
    assert (first.engine_id, first.epoch_ms) == ("e", 7)
    waiting = asyncio.ensure_future(anext(watch))
    await engine.round(Load(held_blocks=3))
    async with asyncio.timeout(5):
        changed = await waiting
        assert changed.held_blocks == 3
        assert changed.sequence == first.sequence + 1
        again = await anext(watch)  # nothing changed: by the clock alone
    assert again.sequence == changed.sequence
    await watch.aclose()


async def test_an_equal_load_wakes_no_watcher():
    engine = Engine()
    await engine.round(Load(held_blocks=3))
    before = engine.state.report().sequence
    await engine.round(Load(held_blocks=3))
    assert engine.state.report().sequence == before
    await engine.state.set_draining()
    assert engine.state.report().sequence == before + 1
    assert engine.state.report().draining


async def test_a_new_placement_version_is_reported():
    engine = Engine()
    before = engine.state.report().sequence
    await engine.round(num_open=0, placement_version=4)
    report = engine.state.report()
    assert (report.sequence, report.placement_version) == (before + 1, 4)


async def test_the_retry_hint_follows_the_measured_rate():
    engine = Engine()
    assert engine.state.retry_after_s == 1.0
    for rate, hint in ((4.0, 0.25), (0.001, 30.0), (1000.0, 0.1)):
        await engine.round(Load(drain_requests_per_s=rate))
        assert engine.state.retry_after_s == hint
