"""What follows a failed attempt, decided without calls or sockets."""

import pytest

from inferfleet_proto.internal.v1 import engine_pb2
from services.balancer.config import BalancerConfig
from services.balancer.engines.engine_view import EngineState, EngineView, RoutingRequest
from services.balancer.request.failure import Failure
from services.balancer.request.incoming import parse
from services.balancer.request.recovery import Finish, GiveUp, Recovery, Retry
from services.common import errors
from tests.doubles.fake_engine import MODEL
from tests.doubles.scripts import stream_of

A = EngineView("a", 1, MODEL, EngineState.SERVING, numerics_id="x")
B = EngineView("b", 1, MODEL, EngineState.SERVING, numerics_id="x")
LOST = Failure(errors.UnavailableError("gone"), lost=True)


@pytest.fixture
def recovery(engine_request):
    incoming = parse(engine_request().SerializeToString())
    config = BalancerConfig(max_attempts=2)
    return Recovery(config, incoming, RoutingRequest("r1", MODEL, range(20)))


@pytest.fixture
def messages(engine_request):
    info = engine_pb2.EngineInfo(engine_id="a")
    return [m.SerializeToString() for m in stream_of(engine_request(), info)]


def fail(recovery, engine, failure, *, started=False):
    return recovery.record_failure(engine, failure, started=started, retry_after_s=7.0)


def test_the_requests_own_fault_ends_it_with_that_error(recovery):
    error = errors.InvalidArgumentError.for_field("sampling.n", "must be positive")
    assert fail(recovery, A, Failure(error)) == GiveUp(error)


def test_a_full_engine_is_left_only_before_its_first_message(recovery):
    full = Failure(errors.ResourceExhaustedError("full"))
    assert fail(recovery, A, full, started=True) == GiveUp(full.error)
    assert fail(recovery, A, full) == Retry()
    assert recovery.excluded == {A.life}


def test_attempts_without_progress_are_bounded(recovery):
    assert fail(recovery, A, LOST) == Retry()
    step = fail(recovery, B, LOST)
    assert isinstance(step, GiveUp)
    assert step.error.reason == "NO_ENGINE"
    assert step.error.retry_after_s == 7.0


def test_progress_clears_failures_and_exclusions(recovery, messages):
    assert fail(recovery, A, LOST) == Retry()
    recovery.accept(B, messages[0], first=True)
    assert not recovery.excluded
    assert fail(recovery, B, LOST, started=True) == Retry()


def test_a_stream_that_lacks_only_its_summary_is_finished_without_an_engine(recovery, messages):
    for number, raw in enumerate(messages[:-1]):
        recovery.accept(A, raw, first=number == 0)
    step = fail(recovery, A, LOST, started=True)
    assert isinstance(step, Finish)
    assert recovery.ledger.complete


def test_a_broken_stream_without_an_engine_is_aborted_with_its_counts(recovery, messages):
    for number, raw in enumerate(messages[:3]):
        recovery.accept(A, raw, first=number == 0)
    assert fail(recovery, A, LOST, started=True) == Retry()
    step = fail(recovery, B, LOST)
    assert isinstance(step, GiveUp)
    assert isinstance(step.error, errors.AbortedError)
    assert step.error.metadata["completion_tokens"] == "2"
    assert "after 2 tokens and no engine resumed it: gone" in step.error.message


def test_only_a_lost_connection_may_be_tried_again_later(recovery):
    fail(recovery, A, LOST)
    assert recovery.barred(now=0.0) == {A.life}
    assert recovery.barred() == set(), "the engine has had the time to reconnect"
    recovery.record_recall(B)
    assert recovery.barred(now=0.0) == {A.life}, "a recalled request may return at once"
    assert recovery.recalled_once
    assert recovery.attempt_number == 2
