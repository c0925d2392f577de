"""An engine's counts: exact in every history, completed between reports; and its stalls."""

import grpc
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from inferfleet_proto.internal.v1 import engine_pb2
from services.balancer.engines.breaker import Breaker
from services.balancer.engines.engine_view import EngineState
from services.balancer.engines.member import CREDIT_GRACE_S, STOPPED_KEPT_S, Member, Outcome


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def make_member(clock, **info):
    facts = {"engine_id": "e", "epoch_ms": 1, "model": "m", "block_size": 4, "max_num_seqs": 8}
    made = engine_pb2.EngineInfo(**{**facts, **info})
    channel: grpc.aio.Channel = None
    return Member(made, channel, Breaker(failures=3), stall_limit_s=10, clock=clock)


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def member(clock):
    made = make_member(clock)
    made.apply_report(engine_pb2.LoadReport(total_blocks=100))
    return made


def test_without_reports_it_is_unreachable(clock):
    assert make_member(clock).state(clock()) is EngineState.UNREACHABLE


def test_dispatches_are_credited_until_a_report_can_hold_them(member, clock):
    dispatch = member.dispatch(uncached_tokens=30, blocks=10)
    seen = member.view(clock())
    assert (seen.occupancy, seen.queued_uncached, seen.held_blocks) == (1, 30, 10)
    member.apply_report(engine_pb2.LoadReport(total_blocks=100))
    assert member.view(clock()).queued_uncached == 30, "the report was on its way already"
    clock.now += CREDIT_GRACE_S * 2
    report = engine_pb2.LoadReport(
        running_requests=1, uncached_tokens_queued=20, held_blocks=10, total_blocks=100
    )
    member.apply_report(report)
    seen = member.view(clock())
    assert (seen.occupancy, seen.queued_uncached, seen.held_blocks) == (1, 20, 10)
    dispatch.end(Outcome.ANSWERED)
    assert member.view(clock()).occupancy == 0


def test_others_requests_count(member, clock):
    member.apply_report(engine_pb2.LoadReport(running_requests=5, waiting_requests=2))
    member.dispatch(uncached_tokens=1, blocks=1)
    assert member.view(clock()).occupancy == 8
    assert member.view(clock()).in_flight == 1


def test_a_stopped_engine_is_stalled_and_not_gone(member, clock):
    clock.now += 11
    assert member.stalled(clock())
    assert member.mark_stuck()
    member.mark_disconnected()  # its pings stay unanswered, too
    clock.now += 14
    assert member.state(clock()) is EngineState.STALLED
    assert member.may_wake(clock())
    member.mark_disconnected(refused=True)  # the process has ended
    assert member.state(clock()) is EngineState.UNREACHABLE
    assert not member.may_wake(clock())
    member.mark_disconnected()
    clock.now += STOPPED_KEPT_S
    assert not member.may_wake(clock()), "a lost machine does not stay for ever"


def test_an_idle_engine_that_falls_silent_is_stalled_and_not_gone(member, clock):
    member.mark_disconnected()
    assert member.state(clock()) is EngineState.UNREACHABLE, "its connection broke at once"
    member.apply_report(engine_pb2.LoadReport())
    clock.now += 19  # the pings stay unanswered
    member.mark_disconnected()
    assert member.state(clock()) is EngineState.STALLED
    member.mark_disconnected()  # trying again changes nothing
    assert member.may_wake(clock())
    member.apply_report(engine_pb2.LoadReport())
    assert member.state(clock()) is EngineState.SERVING


def test_work_without_progress_is_a_stall(member, clock):
    member.apply_report(engine_pb2.LoadReport(running_requests=1, last_progress_age_s=9.5))
    assert member.state(clock()) is EngineState.SERVING
    clock.now += 0.6
    assert member.state(clock()) is EngineState.STALLED
    member.apply_report(engine_pb2.LoadReport(running_requests=1, last_progress_age_s=0.1))
    assert member.state(clock()) is EngineState.SERVING


def test_a_long_prefill_is_given_its_time(member, clock):
    long = engine_pb2.LoadReport(
        running_requests=1,
        last_progress_age_s=20,
        uncached_tokens_queued=15_000,
        prefill_tokens_per_s=1000,
    )
    member.apply_report(long)
    assert not member.stalled(clock())
    clock.now += 5.1
    assert member.stalled(clock())


def test_idle_engines_do_not_stall_but_silent_ones_do(member, clock):
    member.apply_report(engine_pb2.LoadReport(last_progress_age_s=500))
    assert not member.stalled(clock())
    clock.now += 10.1
    assert member.stalled(clock())


def test_our_own_requests_count_as_work_although_a_stopped_core_does_not_count_them(member, clock):
    dispatch = member.dispatch(uncached_tokens=20, blocks=5)
    clock.now += 9
    member.apply_report(engine_pb2.LoadReport(last_progress_age_s=9, prefill_tokens_per_s=2))
    assert member.state(clock()) is EngineState.SERVING
    clock.now += 1.5  # the limit and what 20 tokens may take at the least rate
    assert member.state(clock()) is EngineState.STALLED
    member.mark_stuck()
    dispatch.end(Outcome.FAULT)
    member.apply_report(engine_pb2.LoadReport(last_progress_age_s=11))
    assert member.state(clock()) is EngineState.STALLED, "nothing shows progress"
    member.apply_report(engine_pb2.LoadReport())
    assert member.state(clock()) is EngineState.SERVING


def test_an_idle_engine_has_its_time_from_our_oldest_request_on(member, clock):
    member.apply_report(engine_pb2.LoadReport(last_progress_age_s=500))
    member.dispatch(uncached_tokens=1, blocks=1)
    clock.now += 9
    member.apply_report(engine_pb2.LoadReport(last_progress_age_s=509))
    assert not member.stalled(clock())
    clock.now += 1.1
    assert member.stalled(clock())


def test_a_rank_that_stands_still_holds_a_short_prompt_no_longer_than_the_limit(member, clock):
    # The core waits in its round for the rank: it has counted the request, and measured little.
    stuck = {"running_requests": 1, "uncached_tokens_queued": 50, "prefill_tokens_per_s": 0.5}
    member.dispatch(uncached_tokens=50, blocks=13)
    clock.now += 10.95
    member.apply_report(engine_pb2.LoadReport(last_progress_age_s=10.9, **stuck))
    assert not member.stalled(clock()), "50 tokens may take a second at the least rate"
    clock.now += 0.2
    member.apply_report(engine_pb2.LoadReport(last_progress_age_s=11.1, **stuck))
    assert member.stalled(clock())


def test_a_long_prompt_that_came_during_a_round_has_its_time_too(member, clock):
    clock.now += 1
    member.dispatch(uncached_tokens=5000, blocks=1250)
    clock.now += 12
    busy = {"running_requests": 1, "prefill_tokens_per_s": 1000, "uncached_tokens_queued": 100}
    member.apply_report(engine_pb2.LoadReport(last_progress_age_s=12.5, **busy))
    assert not member.stalled(clock())
    member.apply_report(engine_pb2.LoadReport(last_progress_age_s=15.2, **busy))
    assert member.stalled(clock())


def test_streams_of_an_engine_out_of_reach_are_given_up_too(member, clock):
    member.mark_disconnected()
    assert not member.stalled(clock())
    clock.now += 10.1
    assert member.stalled(clock())
    assert member.state(clock()) is EngineState.UNREACHABLE


def test_draining_is_recognised_from_each_source(clock):
    for how in ("info", "load", "order"):
        member = make_member(clock, draining=how == "info")
        member.apply_report(engine_pb2.LoadReport(draining=how == "load"))
        if how == "order":
            member.order_drain()
        assert member.state(clock()) is EngineState.DRAINING


def test_giving_up_cancels_each_stream_once(member):
    cancelled = []
    dispatches = [
        member.dispatch(uncached_tokens=1, blocks=1, cancel=lambda i=i: cancelled.append(i))
        for i in range(3)
    ]
    dispatches[0].end(Outcome.ANSWERED)
    assert member.give_up("hangs") == 2
    assert member.give_up("hangs") == 0
    assert sorted(cancelled) == [1, 2]
    assert dispatches[1].lost_reason == "hangs"


def test_a_second_end_counts_for_nothing(member, clock):
    dispatches = [member.dispatch(uncached_tokens=1, blocks=1) for _ in range(2)]
    clock.now += 1
    member.apply_report(engine_pb2.LoadReport(running_requests=6))
    for _ in range(3):
        dispatches[0].end(Outcome.FAULT)
    assert member.view(clock()).occupancy == 5
    assert member.state(clock()) is EngineState.SERVING, "one fault, not three"


class Histories(RuleBasedStateMachine):
    """Dispatch, end (also twice), report and give up, in any order."""

    def __init__(self):
        super().__init__()
        self.clock = Clock()
        self.member = make_member(self.clock)
        self.open: list = []
        self.ended: list = []

    @rule(tokens=st.integers(1, 50), blocks=st.integers(1, 9))
    def dispatch(self, tokens, blocks):
        self.open.append(self.member.dispatch(uncached_tokens=tokens, blocks=blocks))

    @precondition(lambda self: self.open)
    @rule(data=st.data(), outcome=st.sampled_from(Outcome))
    def end(self, data, outcome):
        dispatch = self.open.pop(data.draw(st.integers(0, len(self.open) - 1)))
        dispatch.end(outcome)
        self.ended.append(dispatch)

    @precondition(lambda self: self.ended)
    @rule(data=st.data(), outcome=st.sampled_from(Outcome))
    def end_again(self, data, outcome):
        data.draw(st.sampled_from(self.ended)).end(outcome)

    @rule(waiting=st.integers(0, 9), running=st.integers(0, 9), seconds=st.floats(0, 2))
    def report(self, waiting, running, seconds):
        self.clock.now += seconds
        load = engine_pb2.LoadReport(waiting_requests=waiting, running_requests=running)
        self.member.apply_report(load)

    @rule()
    def give_up(self):
        self.member.give_up("test")

    @invariant()
    def exact(self):
        seen = self.member.view(self.clock())
        assert self.member.in_flight == len(self.open) == seen.in_flight
        assert seen.occupancy >= len(self.open)
        assert min(seen.queued_uncached, seen.held_blocks) >= 0


TestHistories = Histories.TestCase
TestHistories.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
