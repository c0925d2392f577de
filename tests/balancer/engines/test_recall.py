"""A request that waits at a full engine is recalled if another has free slots: once, not early."""

import asyncio

import pytest

from inferfleet_proto.internal.v1 import engine_pb2
from services.balancer.engines.breaker import Breaker
from services.balancer.engines.member import CREDIT_GRACE_S, Member
from services.balancer.engines.recall import MIN_WAIT_S, recall_waiting


class Scene:
    """Two engines of 8 slots: `here` is full and has waiting requests, `there` is idle."""

    def __init__(self):
        self.now = 100.0
        self.here, self.there = self.member("here"), self.member("there")
        self.report(self.here, running=8, waiting=3)
        self.report(self.there)

    def member(self, engine_id, **info):
        facts = {"epoch_ms": 1, "model": "m", "block_size": 4, "max_num_seqs": 8}
        facts |= {"numerics_id": "n", **info}
        made = engine_pb2.EngineInfo(engine_id=engine_id, **facts)
        return Member(made, None, Breaker(3), stall_limit_s=60, clock=lambda: self.now)

    @staticmethod
    def report(member, running=0, waiting=0, **more):
        facts = {"total_blocks": 100, "prefill_tokens_per_s": 100.0, **more}
        member.apply_report(
            engine_pb2.LoadReport(running_requests=running, waiting_requests=waiting, **facts)
        )

    def sent(self, member=None, *, blocks=1, **changes):
        dispatch = (member or self.here).dispatch(uncached_tokens=1, blocks=blocks, **changes)
        self.now += CREDIT_GRACE_S * 2
        self.report(self.here, running=8, waiting=3)
        return dispatch

    def after(self, seconds):
        self.now += seconds
        self.here.apply_report(self.here.load)
        self.there.apply_report(self.there.load)
        return recall_waiting([self.here, self.there], self.now)


@pytest.fixture
def scene():
    return Scene()


def test_after_its_time_it_is_recalled_once(scene):
    cancelled = []
    dispatch = scene.sent(cancel=lambda: cancelled.append(1))
    assert scene.after(MIN_WAIT_S / 2) == 0
    assert scene.after(MIN_WAIT_S) == 1
    assert cancelled == [1]
    assert dispatch.recalled
    assert dispatch.lost_reason is None, "the engine is not given up"
    assert scene.after(60.0) == 0


def test_it_waits_as_long_as_computing_the_prompt_elsewhere_takes(scene):
    scene.sent(blocks=100)  # 400 tokens at 100 a second
    assert scene.after(3.0) == 0
    assert scene.after(1.5) == 1


def test_a_started_request_and_one_recalled_before_stay(scene):
    scene.sent().mark_started()
    scene.sent(movable=False)
    assert scene.after(60.0) == 0


def test_half_of_the_free_slots_and_the_newest_first(scene):
    scene.report(scene.there, running=4)
    dispatches = [scene.sent() for _ in range(3)]
    assert scene.after(5.0) == 2
    assert [dispatch.recalled for dispatch in dispatches] == [False, True, True]


def test_a_request_of_many_choices_needs_as_many_slots(scene):
    scene.sent(slots=5)
    assert scene.after(5.0) == 0, "4 of the 8 are given away at a time"
    scene.sent(slots=4)
    assert scene.after(5.0) == 1


@pytest.mark.parametrize(
    "there",
    [
        {"running": 8},
        {"running": 1, "waiting": 1},
        {"held_blocks": 95},
        {"draining": True},
    ],
)
def test_no_request_is_moved_to_an_engine_without_free_slots(scene, there):
    scene.sent()
    scene.report(scene.there, **there)
    assert scene.after(5.0) == 0


@pytest.mark.parametrize("info", [{"numerics_id": "o"}, {"model": "o"}, {"model_revision": "o"}])
def test_no_request_is_moved_to_an_engine_that_differs(scene, info):
    scene.there = scene.member("there", **info)
    scene.report(scene.there)
    scene.sent()
    assert scene.after(5.0) == 0


def test_waiting_for_a_grammar_or_a_prefill_is_not_waiting_for_a_slot(scene):
    scene.sent()
    scene.report(scene.here, running=5, waiting=2)
    assert scene.after(5.0) == 0
    scene.report(scene.here, running=5, waiting=2, held_blocks=95)
    assert scene.after(5.0) == 1, "its cache is full"


async def fill(engine):
    engine.load.running_requests, engine.load.waiting_requests = 8, 1
    engine.report_now()


async def test_it_is_answered_elsewhere_and_no_failure_is_counted(
    fleet, engine_request, as_seen, undisturbed, wait_until
):
    full, idle = await fleet.add("full"), await fleet.add("idle")
    fleet.index.holds(full, 4)
    full.stop_core()
    request = engine_request()
    asking = asyncio.create_task(fleet.ask(request))
    await wait_until(lambda: full.requests, "it is there")
    await fill(full)
    assert as_seen(await asking) == undisturbed(request)
    assert [r.attempt for r in (*full.requests, *idle.requests)] == [0, 1]
    assert not idle.requests[0].HasField("continuation")
    await fleet.until_idle()
    await wait_until(lambda: not full.running, "its call was cancelled")
    assert fleet.member("full").breaker.consecutive_failures == 0
    assert fleet.metric("inferfleet_balancer_retries_total", status="RECALLED") == 1


async def test_a_stream_to_be_resumed_is_recalled_too(
    fleet, engine_request, as_seen, undisturbed, wait_until
):
    first, full = await fleet.add("first"), await fleet.add("full")
    fleet.index.holds(first, 4)
    first.break_after = 4
    full.stop_core()
    request = engine_request()
    asking = asyncio.create_task(fleet.ask(request))
    await wait_until(lambda: full.requests, "it resumes there")
    idle = await fleet.add("idle")
    await fill(full)
    messages = await asking
    assert as_seen(messages) == undisturbed(request)
    assert messages[-1].summary.continuations == 1
    assert [r.attempt for r in (*full.requests, *idle.requests)] == [1, 2]
    await fleet.until_idle()


async def test_if_the_other_dies_meanwhile_the_first_may_have_it_again(
    fleet, engine_request, as_seen, undisturbed, wait_until
):
    full, other = await fleet.add("full"), await fleet.add("other")
    fleet.index.holds(full, 4)
    full.stop_core()
    other.break_after = 0
    request = engine_request()
    asking = asyncio.create_task(fleet.ask(request))
    await wait_until(lambda: full.requests, "it is there")
    await fill(full)
    await wait_until(lambda: other.requests, "it was moved")
    full.continue_core()
    assert as_seen(await asking) == undisturbed(request)
    await fleet.until_idle()
