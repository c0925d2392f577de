"""Waiting for a place: order, bounds, deadlines, and places never lost or given twice."""

import asyncio
import dataclasses

import pytest

from services.balancer.engines.engine_view import Asked, EngineState, EngineView
from services.balancer.queue.admission import Admission
from services.balancer.queue.drain_rate import DrainRate
from services.common import errors


class Door:
    """An admission over one imagined engine whose occupancy the test sets."""

    def __init__(self, places=1, **changes):
        self.engine = EngineView("e", 1, "m", EngineState.SERVING, max_num_seqs=places)
        facts = {"queue_size": 4, "headroom": 0, "patience_s": 0.2}
        self.admission = Admission(lambda model: [self.engine], **{**facts, **changes})
        self.order: list[str] = []

    def occupy(self, occupancy, state=EngineState.SERVING):
        self.engine = dataclasses.replace(self.engine, occupancy=occupancy, state=state)
        self.admission.pump()

    async def enter(self, name, *, tenant="", priority=0, timeout_s=None):
        asked = Asked(name, "m", (1, 2), tenant=tenant, priority=priority)
        grant = await self.admission.enter(asked, timeout_s)
        self.order.append(name)
        return grant

    async def queue(self, *names, **changes):
        tasks = []
        for name in names:
            tasks.append(asyncio.create_task(self.enter(name, **changes)))
            await asyncio.sleep(0)
        return tasks

    def assert_clean(self):
        assert not self.admission._reserved
        assert not self.admission.counters.active
        assert not any(self.admission.queued().values())


async def test_a_free_place_is_had_at_once():
    door = Door()
    grant = await door.enter("a")
    assert not door.admission._fits(grant.asked), "reserved until it is dispatched"
    grant.use()
    grant.use()
    assert door.admission._fits(grant.asked)
    grant.leave()
    grant.leave()
    door.assert_clean()


async def test_the_queue_moves_when_room_appears():
    door = Door()
    door.occupy(1)
    tasks = await door.queue("a", "b")
    assert door.admission.queued() == {"m": 2}
    door.occupy(0)
    first = await tasks[0]
    assert not tasks[1].done(), "one place, one grant"
    first.leave()
    (await tasks[1]).leave()
    assert door.order == ["a", "b"]
    door.assert_clean()


async def test_nobody_overtakes_the_queue():
    door = Door()
    door.occupy(1)
    waiting = await door.queue("a")
    door.engine = dataclasses.replace(door.engine, occupancy=0)  # not yet pumped
    late = await door.queue("b")
    door.admission.pump()
    (await waiting[0]).leave()
    (await late[0]).leave()
    assert door.order == ["a", "b"]


async def test_a_full_queue_refuses_with_a_hint():
    door = Door()
    door.occupy(1)
    tasks = await door.queue("a", "b", "c", "d")
    with pytest.raises(errors.ResourceExhaustedError) as caught:
        await door.enter("e")
    assert caught.value.reason == "QUEUE_FULL"
    assert caught.value.retry_after_s >= 0.5
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    door.assert_clean()


async def test_a_fairer_claim_displaces_with_the_same_status():
    door = Door()
    door.occupy(1)
    flood = await door.queue("a", "b", "c", "d", tenant="flood")
    calm = await door.queue("x", tenant="calm")
    with pytest.raises(errors.ResourceExhaustedError):
        await flood[3]
    door.occupy(0)
    for task in (*flood[:3], *calm):
        (await task).leave()
    door.assert_clean()


async def test_a_deadline_in_the_queue_is_honoured():
    door = Door(patience_s=5)
    door.occupy(1)
    with pytest.raises(errors.DeadlineExceededError):
        await door.enter("a", timeout_s=0.05)
    with pytest.raises(errors.DeadlineExceededError):
        await door.enter("b", timeout_s=0)
    door.assert_clean()


async def test_without_a_healthy_engine_patience_ends():
    door = Door(patience_s=0.05)
    door.occupy(0, EngineState.UNREACHABLE)
    with pytest.raises(errors.UnavailableError) as caught:
        await door.enter("a")
    assert caught.value.retry_after_s is not None
    door.assert_clean()


async def test_an_engine_that_recovers_in_time_serves():
    door = Door(patience_s=10)
    door.occupy(0, EngineState.OPEN)
    tasks = await door.queue("a")
    door.occupy(0)
    (await tasks[0]).leave()
    door.assert_clean()


async def test_a_cancel_in_the_moment_of_the_grant_returns_the_place():
    door = Door()
    door.occupy(1)
    tasks = await door.queue("a", "b")
    door.occupy(0)  # grants to "a", whose task has not run yet
    tasks[0].cancel()
    (await tasks[1]).leave()
    assert door.order == ["b"]
    door.assert_clean()


async def test_the_drain_rate_is_measured():
    now = [0.0]
    rate = DrainRate(lambda: now[0])
    assert rate.per_s() == 0
    for _ in range(1000):
        now[0] += 0.1
        rate.ended()
    assert rate.per_s() == pytest.approx(10, rel=0.1)
    now[0] += 100
    assert rate.per_s() < 0.1


async def test_a_request_of_n_choices_takes_n_places():
    door = Door(places=4)
    wide = dataclasses.replace(Asked("wide", "m", (1, 2)), num_choices=3)
    grant = await door.admission.enter(wide, None)
    second = await door.enter("narrow")
    tasks = await door.queue("late")
    assert door.admission.queued() == {"m": 1}, "3 + 1 places of 4 are promised"
    grant.leave()
    await tasks[0]
    second.leave()
    tasks[0].result().leave()
    door.assert_clean()


async def test_nobody_overtakes_a_wide_request_that_waits_for_its_places():
    door = Door(places=4)
    door.occupy(2)
    wide = dataclasses.replace(Asked("wide", "m", (1, 2)), num_choices=3)
    task = asyncio.create_task(door.admission.enter(wide, None))
    await asyncio.sleep(0)
    (narrow,) = await door.queue("narrow")
    door.admission.pump()
    await asyncio.sleep(0)
    assert not task.done()
    assert not narrow.done()
    door.occupy(0)
    (await task).leave()
    (await narrow).leave()
    door.assert_clean()


async def test_a_request_wider_than_any_engine_gets_the_whole_of_one():
    door = Door(places=2)
    wide = dataclasses.replace(Asked("wide", "m", (1, 2)), num_choices=16)
    (await door.admission.enter(wide, None)).leave()
    door.occupy(1)
    task = asyncio.create_task(door.admission.enter(wide, None))
    await asyncio.sleep(0)
    assert not task.done()
    door.occupy(0)
    (await task).leave()
    door.assert_clean()


async def test_expired_work_is_not_granted_though_nobody_looked_yet():
    now = [0.0]
    door = Door(clock=lambda: now[0])
    door.occupy(1)
    late = asyncio.create_task(door.enter("late", timeout_s=5.0))
    await asyncio.sleep(0)
    (next_one,) = await door.queue("next")
    now[0] = 6.0
    door.occupy(0)  # both the place and the end of the deadline are there
    (await next_one).leave()
    with pytest.raises(errors.DeadlineExceededError):
        await late
    assert door.order == ["next"]
    door.assert_clean()


async def test_lanes_of_two_revisions_share_nothing_but_engines_of_both():
    engines = [
        EngineView("a", 1, "m", EngineState.SERVING, revision="r1", max_num_seqs=1),
        EngineView("b", 1, "m", EngineState.SERVING, revision="r2", max_num_seqs=1),
    ]
    door = Admission(lambda model: engines, queue_size=4, headroom=0, patience_s=0.2)
    old = Asked("old", "m", (1, 2), revision="r1")
    first = await door.enter(old, None)
    waiting = asyncio.create_task(door.enter(old, None))
    await asyncio.sleep(0)
    assert not waiting.done(), "the place of r2 is none for r1"
    other = await door.enter(dataclasses.replace(old, revision="r2"), None)
    anywhere = asyncio.create_task(door.enter(dataclasses.replace(old, revision=""), None))
    await asyncio.sleep(0)
    assert not anywhere.done(), "both are promised"
    other.leave()
    (await anywhere).leave()
    first.leave()
    (await waiting).leave()
    assert not door._reserved
    assert not door.counters.active


async def test_a_revision_without_engines_is_told_as_such():
    door = Door(patience_s=0.05)
    asked = dataclasses.replace(Asked("a", "m", (1, 2)), revision="r9")
    with pytest.raises(errors.UnavailableError) as caught:
        await door.admission.enter(asked, None)
    assert caught.value.reason == "NO_ENGINE"
    door.assert_clean()


async def test_the_hint_is_of_the_model_that_is_full():
    now = [0.0]
    door = Door(queue_size=0, clock=lambda: now[0])
    for _ in range(20):
        now[0] += 0.1
        (await door.enter("x")).leave()
    other = Asked("y", "other", (1,))
    assert door.admission.retry_after_s(Asked("x", "m", (1,))) == 0.5, "10 a second end"
    assert door.admission.retry_after_s(other) == 1.0, "nothing is known of it"


async def served(door, seconds, now, *, output=10):
    grant = await door.admission.enter(
        dataclasses.replace(Asked("x", "m", (1,)), expected_output=output), None
    )
    grant.use()
    now[0] += seconds
    grant.served()
    grant.leave()


async def test_a_wait_that_outlasts_the_deadline_is_refused_at_once():
    now = [0.0]
    door = Door(clock=lambda: now[0], queue_size=100)
    await served(door, 10.0, now)
    door.occupy(1)
    asked = dataclasses.replace(Asked("y", "m", (1,)), expected_output=10)
    with pytest.raises(errors.ResourceExhaustedError) as caught:
        await door.admission.enter(asked, 5.0)  # one answer alone takes 10 s
    assert caught.value.retry_after_s > 0
    assert "outlasts the deadline" in caught.value.message
    short = dataclasses.replace(asked, expected_output=1)
    waits = asyncio.create_task(door.admission.enter(short, 5.0))
    patient = asyncio.create_task(door.admission.enter(asked, None))
    await asyncio.sleep(0)
    assert not waits.done(), "a short answer fits, and no deadline is never too short"
    door.occupy(0)
    (await waits).leave()
    (await patient).leave()
    door.assert_clean()


async def test_idle_engines_are_not_taken_for_slow_ones():
    now = [0.0]
    door = Door(places=8, clock=lambda: now[0], queue_size=100)
    await served(door, 1.0, now)
    now[0] += 3600.0  # nothing has ended for an hour: the measured rate is about 0
    door.occupy(8)
    asked = dataclasses.replace(Asked("y", "m", (1,)), expected_output=10)
    tasks = [asyncio.create_task(door.admission.enter(asked, 5.0)) for _ in range(24)]
    await asyncio.sleep(0)
    assert door.admission.queued() == {"m": 24}, "8 places of 1 s: the last waits 3 s"
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)


async def test_work_that_cannot_end_in_time_any_more_is_not_started():
    now = [0.0]
    door = Door(clock=lambda: now[0], queue_size=100)
    await served(door, 10.0, now)
    door.occupy(1)
    asked = dataclasses.replace(Asked("y", "m", (1,)), expected_output=10)
    late = asyncio.create_task(door.admission.enter(asked, 12.0))
    await asyncio.sleep(0)
    now[0] += 8.0
    door.occupy(0)
    with pytest.raises(errors.DeadlineExceededError):
        await late
    door.assert_clean()


async def test_a_tenant_with_little_waiting_is_not_judged_by_the_others_queue():
    now = [0.0]
    door = Door(clock=lambda: now[0], queue_size=100)
    await served(door, 1.0, now)
    door.occupy(1)
    flood = dataclasses.replace(Asked("f", "m", (1,), tenant="flood"), expected_output=10)
    tasks = [asyncio.create_task(door.admission.enter(flood, None)) for _ in range(50)]
    await asyncio.sleep(0)
    calm = dataclasses.replace(flood, tenant="calm")
    tasks.append(asyncio.create_task(door.admission.enter(calm, 5.0)))
    await asyncio.sleep(0)
    assert not tasks[-1].done()
    with pytest.raises(errors.ResourceExhaustedError):
        await door.admission.enter(flood, 5.0)
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)


async def test_a_request_that_outlasted_its_deadline_counts_for_the_next():
    now = [0.0]
    door = Door(clock=lambda: now[0], queue_size=100)
    await served(door, 1.0, now)
    asked = dataclasses.replace(Asked("y", "m", (1,)), expected_output=10)
    for _ in range(50):  # engines have become slow: nothing is answered any more
        grant = await door.admission.enter(asked, 6.0)
        grant.use()
        now[0] += 6.0
        grant.leave()
    door.occupy(1)
    with pytest.raises(errors.ResourceExhaustedError):
        await door.admission.enter(asked, 4.0)
    door.assert_clean()


@pytest.mark.parametrize(("allowed_s", "waited_s", "starts"), [(9.0, 7.2, False), (1.8, 0.1, True)])
async def test_what_began_with_little_time_gets_its_chance(allowed_s, waited_s, starts):
    """Both have about 1.8 s left, where requests take 1 or 2 s."""
    now = [0.0]
    door = Door(clock=lambda: now[0], queue_size=100)
    for seconds in (1.0, 2.0) * 50:
        await served(door, seconds, now)
    door.occupy(1)
    asked = dataclasses.replace(Asked("y", "m", (1,)), expected_output=10)
    waits = asyncio.create_task(door.admission.enter(asked, allowed_s))
    await asyncio.sleep(0)
    now[0] += waited_s
    door.occupy(0)
    if starts:
        (await waits).leave()
    else:
        with pytest.raises(errors.DeadlineExceededError):
            await waits
    door.assert_clean()
