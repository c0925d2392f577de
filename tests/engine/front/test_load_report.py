import asyncio

from services.engine.contract.messages import Load
from services.engine.front.load_report import LoadBoard


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def board(clock, stall_s=5.0):
    return LoadBoard("e", 7, stall_s=stall_s, clock=clock)


async def test_an_idle_core_is_never_stalled():
    clock = Clock()
    made = board(clock)
    clock.now += 1000
    assert (made.progress_age_s, made.stalled) == (0.0, False)


async def test_work_without_a_round_is_a_stall_and_a_round_ends_it():
    clock = Clock()
    made = board(clock)
    made.work_arrived()
    clock.now += 4
    made.work_arrived()  # more work is no progress
    clock.now += 2
    assert made.progress_age_s == 6
    assert made.stalled
    assert made.report().last_progress_age_s == 6
    await made.update(Load(), num_open=1)
    assert not made.stalled
    await made.update(Load(), num_open=0)
    clock.now += 100
    assert not made.stalled


async def test_what_a_silent_core_was_given_is_reported_as_waiting():
    clock = Clock()
    made = board(clock)
    made.count_open = lambda: 3
    await made.update(Load(running_requests=1), num_open=3)
    assert made.report().waiting_requests == 0, "the core's own numbers, as long as they are fresh"
    clock.now += 1.5
    report = made.report()
    assert (report.waiting_requests, report.running_requests) == (2, 1)
    await made.update(Load(waiting_requests=1, running_requests=2), num_open=3)
    assert made.report().waiting_requests == 1


async def test_an_engine_with_long_rounds_is_given_time():
    clock = Clock()
    made = board(clock)
    made.work_arrived()
    clock.now += 3
    await made.update(Load(), num_open=1)
    clock.now += 29
    assert not made.stalled
    clock.now += 2
    assert made.stalled


async def test_a_watcher_hears_at_once_at_changes_and_once_a_second():
    made = board(Clock())
    watch = made.watch()
    first = await anext(watch)
    assert (first.engine_id, first.epoch_ms) == ("e", 7)
    waiting = asyncio.ensure_future(anext(watch))
    await made.update(Load(held_blocks=3), num_open=1)
    async with asyncio.timeout(5):
        changed = await waiting
        assert changed.held_blocks == 3
        assert changed.sequence == first.sequence + 1
        again = await anext(watch)  # nothing changed: by the clock alone
    assert again.sequence == changed.sequence
    await watch.aclose()


async def test_an_equal_load_wakes_nobody():
    made = board(Clock())
    await made.update(Load(held_blocks=3), num_open=1)
    before = made.report().sequence
    await made.update(Load(held_blocks=3), num_open=1)
    assert made.report().sequence == before
    await made.set_draining()
    assert made.report().sequence == before + 1
    assert made.report().draining


async def test_a_new_map_of_experts_is_told():
    made = board(Clock())
    before = made.report().sequence
    await made.update(Load(), num_open=0, placement_version=4)
    assert (made.report().sequence, made.report().placement_version) == (before + 1, 4)


def test_the_hint_follows_the_measured_rate():
    made = LoadBoard("e", 7, stall_s=5.0)
    assert made.retry_after_s == 1.0
    made.load = Load(drain_requests_per_s=4.0)
    assert made.retry_after_s == 0.25
    made.load = Load(drain_requests_per_s=0.001)
    assert made.retry_after_s == 30.0
