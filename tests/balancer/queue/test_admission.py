"""Waiting for a slot: order, bounds, deadlines, and slots never lost or given twice."""

import asyncio
import dataclasses

import pytest

from services.balancer.engines.engine_view import EngineState, EngineView, RoutingRequest
from services.balancer.queue.admission import Admission
from services.balancer.queue.drain_rate import DrainRate
from services.common import errors


class OneEngine:
    """An admission over one simulated engine whose occupancy the test sets."""

    def __init__(self, slots=1, **changes):
        self.engine = EngineView("e", 1, "m", EngineState.SERVING, max_num_seqs=slots)
        facts = {"queue_size": 4, "headroom": 0, "patience_s": 0.2}
        self.admission = Admission(lambda model: [self.engine], **{**facts, **changes})
        self.order: list[str] = []

    def occupy(self, occupancy, state=EngineState.SERVING):
        self.engine = dataclasses.replace(self.engine, occupancy=occupancy, state=state)
        self.admission.pump()

    async def enter(self, name, *, tenant="", priority=0, timeout_s=None):
        request = RoutingRequest(name, "m", (1, 2), tenant=tenant, priority=priority)
        slot = await self.admission.enter(request, timeout_s)
        self.order.append(name)
        return slot

    async def queue(self, *names, **changes):
        tasks = []
        for name in names:
            tasks.append(asyncio.create_task(self.enter(name, **changes)))
            await asyncio.sleep(0)
        return tasks

    def assert_clean(self):
        assert self.admission.reserved_slots == 0
        assert not self.admission.counters.active
        assert not any(self.admission.queued().values())


async def test_a_free_slot_is_granted_at_once():
    one = OneEngine()
    slot = await one.enter("a")
    assert not one.admission._fits(slot.request), "reserved until it is dispatched"
    slot.use()
    slot.use()
    assert one.admission._fits(slot.request)
    slot.close()
    slot.close()
    one.assert_clean()


async def test_the_queue_moves_when_room_appears():
    one = OneEngine()
    one.occupy(1)
    tasks = await one.queue("a", "b")
    assert one.admission.queued() == {"m": 2}
    one.occupy(0)
    first = await tasks[0]
    assert not tasks[1].done(), "one slot, one admission"
    first.close()
    (await tasks[1]).close()
    assert one.order == ["a", "b"]
    one.assert_clean()


async def test_no_request_overtakes_the_queue():
    one = OneEngine()
    one.occupy(1)
    waiting = await one.queue("a")
    one.engine = dataclasses.replace(one.engine, occupancy=0)  # not yet pumped
    late = await one.queue("b")
    one.admission.pump()
    (await waiting[0]).close()
    (await late[0]).close()
    assert one.order == ["a", "b"]


async def test_a_full_queue_refuses_with_a_hint():
    one = OneEngine()
    one.occupy(1)
    tasks = await one.queue("a", "b", "c", "d")
    with pytest.raises(errors.ResourceExhaustedError) as caught:
        await one.enter("e")
    assert caught.value.reason == "QUEUE_FULL"
    assert caught.value.retry_after_s >= 0.5
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    one.assert_clean()


async def test_a_fairer_claim_displaces_with_the_same_status():
    one = OneEngine()
    one.occupy(1)
    flood = await one.queue("a", "b", "c", "d", tenant="flood")
    calm = await one.queue("x", tenant="calm")
    with pytest.raises(errors.ResourceExhaustedError):
        await flood[3]
    one.occupy(0)
    for task in (*flood[:3], *calm):
        (await task).close()
    one.assert_clean()


async def test_a_deadline_in_the_queue_is_honoured():
    one = OneEngine(patience_s=5)
    one.occupy(1)
    with pytest.raises(errors.DeadlineExceededError):
        await one.enter("a", timeout_s=0.05)
    with pytest.raises(errors.DeadlineExceededError):
        await one.enter("b", timeout_s=0)
    one.assert_clean()


async def test_without_a_healthy_engine_patience_ends():
    one = OneEngine(patience_s=0.05)
    one.occupy(0, EngineState.UNREACHABLE)
    with pytest.raises(errors.UnavailableError) as caught:
        await one.enter("a")
    assert caught.value.retry_after_s is not None
    one.assert_clean()


async def test_an_engine_that_recovers_in_time_serves():
    one = OneEngine(patience_s=10)
    one.occupy(0, EngineState.OPEN)
    tasks = await one.queue("a")
    one.occupy(0)
    (await tasks[0]).close()
    one.assert_clean()


async def test_a_cancel_at_the_moment_of_admission_returns_the_slot():
    one = OneEngine()
    one.occupy(1)
    tasks = await one.queue("a", "b")
    one.occupy(0)  # admits "a", whose task has not run yet
    tasks[0].cancel()
    (await tasks[1]).close()
    assert one.order == ["b"]
    one.assert_clean()


async def test_the_drain_rate_is_measured():
    now = [0.0]
    rate = DrainRate(lambda: now[0])
    assert rate.per_s() == 0
    for _ in range(1000):
        now[0] += 0.1
        rate.record_end()
    assert rate.per_s() == pytest.approx(10, rel=0.1)
    now[0] += 100
    assert rate.per_s() < 0.1


async def test_a_request_of_n_choices_takes_n_slots():
    one = OneEngine(slots=4)
    wide = dataclasses.replace(RoutingRequest("wide", "m", (1, 2)), num_choices=3)
    slot = await one.admission.enter(wide, None)
    second = await one.enter("narrow")
    tasks = await one.queue("late")
    assert one.admission.queued() == {"m": 1}, "3 + 1 slots of 4 are promised"
    slot.close()
    await tasks[0]
    second.close()
    tasks[0].result().close()
    one.assert_clean()


async def test_no_request_overtakes_a_wide_one_that_waits_for_its_slots():
    one = OneEngine(slots=4)
    one.occupy(2)
    wide = dataclasses.replace(RoutingRequest("wide", "m", (1, 2)), num_choices=3)
    task = asyncio.create_task(one.admission.enter(wide, None))
    await asyncio.sleep(0)
    (narrow,) = await one.queue("narrow")
    one.admission.pump()
    await asyncio.sleep(0)
    assert not task.done()
    assert not narrow.done()
    one.occupy(0)
    (await task).close()
    (await narrow).close()
    one.assert_clean()


async def test_a_request_wider_than_any_engine_gets_the_whole_of_one():
    one = OneEngine(slots=2)
    wide = dataclasses.replace(RoutingRequest("wide", "m", (1, 2)), num_choices=16)
    (await one.admission.enter(wide, None)).close()
    one.occupy(1)
    task = asyncio.create_task(one.admission.enter(wide, None))
    await asyncio.sleep(0)
    assert not task.done()
    one.occupy(0)
    (await task).close()
    one.assert_clean()


async def test_an_expired_request_is_not_admitted_although_its_task_has_not_run_yet():
    now = [0.0]
    one = OneEngine(clock=lambda: now[0])
    one.occupy(1)
    late = asyncio.create_task(one.enter("late", timeout_s=5.0))
    await asyncio.sleep(0)
    (next_one,) = await one.queue("next")
    now[0] = 6.0
    one.occupy(0)  # the slot becomes free after the deadline
    (await next_one).close()
    with pytest.raises(errors.DeadlineExceededError):
        await late
    assert one.order == ["next"]
    one.assert_clean()


async def test_queues_of_two_revisions_share_only_requests_without_a_revision():
    engines = [
        EngineView("a", 1, "m", EngineState.SERVING, revision="r1", max_num_seqs=1),
        EngineView("b", 1, "m", EngineState.SERVING, revision="r2", max_num_seqs=1),
    ]
    one = Admission(lambda model: engines, queue_size=4, headroom=0, patience_s=0.2)
    old = RoutingRequest("old", "m", (1, 2), revision="r1")
    first = await one.enter(old, None)
    waiting = asyncio.create_task(one.enter(old, None))
    await asyncio.sleep(0)
    assert not waiting.done(), "the slot of r2 cannot serve r1"
    other = await one.enter(dataclasses.replace(old, revision="r2"), None)
    anywhere = asyncio.create_task(one.enter(dataclasses.replace(old, revision=""), None))
    await asyncio.sleep(0)
    assert not anywhere.done(), "both are promised"
    other.close()
    (await anywhere).close()
    first.close()
    (await waiting).close()
    assert one.reserved_slots == 0
    assert not one.counters.active


async def test_a_revision_without_engines_has_no_engine():
    one = OneEngine(patience_s=0.05)
    request = dataclasses.replace(RoutingRequest("a", "m", (1, 2)), revision="r9")
    with pytest.raises(errors.UnavailableError) as caught:
        await one.admission.enter(request, None)
    assert caught.value.reason == "NO_ENGINE"
    one.assert_clean()


async def test_the_hint_is_of_the_model_that_is_full():
    now = [0.0]
    one = OneEngine(queue_size=0, clock=lambda: now[0])
    for _ in range(20):
        now[0] += 0.1
        (await one.enter("x")).close()
    other = RoutingRequest("y", "other", (1,))
    assert one.admission.retry_after_s(RoutingRequest("x", "m", (1,))) == 0.5, "10 a second end"
    assert one.admission.retry_after_s(other) == 1.0, "no rate is known for it"


async def serve_one(one, seconds, now, *, output=10):
    slot = await one.admission.enter(
        dataclasses.replace(RoutingRequest("x", "m", (1,)), expected_output=output), None
    )
    slot.use()
    now[0] += seconds
    slot.record_answer()
    slot.close()


async def test_a_wait_that_exceeds_the_deadline_is_refused_at_once():
    now = [0.0]
    one = OneEngine(clock=lambda: now[0], queue_size=100)
    await serve_one(one, 10.0, now)
    one.occupy(1)
    request = dataclasses.replace(RoutingRequest("y", "m", (1,)), expected_output=10)
    with pytest.raises(errors.ResourceExhaustedError) as caught:
        await one.admission.enter(request, 5.0)  # one answer alone takes 10 s
    assert caught.value.retry_after_s > 0
    assert "exceeds the deadline of 5.0 s" in caught.value.message
    short = dataclasses.replace(request, expected_output=1)
    waits = asyncio.create_task(one.admission.enter(short, 5.0))
    patient = asyncio.create_task(one.admission.enter(request, None))
    await asyncio.sleep(0)
    assert not waits.done(), "a short answer fits, and no deadline is never too short"
    one.occupy(0)
    (await waits).close()
    (await patient).close()
    one.assert_clean()


async def test_idle_engines_are_not_mistaken_for_slow_ones():
    now = [0.0]
    one = OneEngine(slots=8, clock=lambda: now[0], queue_size=100)
    await serve_one(one, 1.0, now)
    now[0] += 3600.0  # nothing has ended for an hour: the measured rate is about 0
    one.occupy(8)
    request = dataclasses.replace(RoutingRequest("y", "m", (1,)), expected_output=10)
    tasks = [asyncio.create_task(one.admission.enter(request, 5.0)) for _ in range(24)]
    await asyncio.sleep(0)
    assert one.admission.queued() == {"m": 24}, "8 slots of 1 s: the last waits 3 s"
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)


async def test_work_that_cannot_end_in_time_any_more_is_not_started():
    now = [0.0]
    one = OneEngine(clock=lambda: now[0], queue_size=100)
    await serve_one(one, 10.0, now)
    one.occupy(1)
    request = dataclasses.replace(RoutingRequest("y", "m", (1,)), expected_output=10)
    late = asyncio.create_task(one.admission.enter(request, 12.0))
    await asyncio.sleep(0)
    now[0] += 8.0
    one.occupy(0)
    with pytest.raises(errors.DeadlineExceededError):
        await late
    one.assert_clean()


async def test_a_tenant_with_few_requests_is_not_judged_by_the_queue_of_others():
    now = [0.0]
    one = OneEngine(clock=lambda: now[0], queue_size=100)
    await serve_one(one, 1.0, now)
    one.occupy(1)
    flood = dataclasses.replace(RoutingRequest("f", "m", (1,), tenant="flood"), expected_output=10)
    tasks = [asyncio.create_task(one.admission.enter(flood, None)) for _ in range(50)]
    await asyncio.sleep(0)
    calm = dataclasses.replace(flood, tenant="calm")
    tasks.append(asyncio.create_task(one.admission.enter(calm, 5.0)))
    await asyncio.sleep(0)
    assert not tasks[-1].done()
    with pytest.raises(errors.ResourceExhaustedError):
        await one.admission.enter(flood, 5.0)
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)


async def test_a_request_that_exceeded_its_deadline_counts_for_the_next():
    now = [0.0]
    one = OneEngine(clock=lambda: now[0], queue_size=100)
    await serve_one(one, 1.0, now)
    request = dataclasses.replace(RoutingRequest("y", "m", (1,)), expected_output=10)
    for _ in range(50):  # engines have become slow: nothing is answered any more
        slot = await one.admission.enter(request, 6.0)
        slot.use()
        now[0] += 6.0
        slot.close()
    one.occupy(1)
    with pytest.raises(errors.ResourceExhaustedError):
        await one.admission.enter(request, 4.0)
    one.assert_clean()


@pytest.mark.parametrize(("allowed_s", "waited_s", "starts"), [(9.0, 7.2, False), (1.8, 0.1, True)])
async def test_a_request_that_came_with_little_time_is_tried(allowed_s, waited_s, starts):
    """Both have about 1.8 s left, where requests take 1 or 2 s."""
    now = [0.0]
    one = OneEngine(clock=lambda: now[0], queue_size=100)
    for seconds in (1.0, 2.0) * 50:
        await serve_one(one, seconds, now)
    one.occupy(1)
    request = dataclasses.replace(RoutingRequest("y", "m", (1,)), expected_output=10)
    waits = asyncio.create_task(one.admission.enter(request, allowed_s))
    await asyncio.sleep(0)
    now[0] += waited_s
    one.occupy(0)
    if starts:
        (await waits).close()
    else:
        with pytest.raises(errors.DeadlineExceededError):
            await waits
    one.assert_clean()
