"""Engines that refuse, break, hang and vanish: another one takes over, or the client gets an
error."""

import asyncio

import grpc
import pytest

from inferfleet_proto.admin.v1 import fleet_pb2
from services.common import errors


@pytest.mark.parametrize(
    ("failure", "charged"),
    [
        (errors.UnavailableError("down"), True),
        (errors.InternalError("bug"), True),
        (errors.DataLossError("nan"), True),
        (errors.ResourceExhaustedError("full"), False),
        (errors.UnavailableError("bye", reason="DRAINING"), False),
    ],
)
async def test_before_the_first_message_another_engine_takes_it(
    fleet, engine_request, as_seen, undisturbed, failure, charged
):
    bad, good = await fleet.add("bad"), await fleet.add("good")
    fleet.index.holds(bad, 4)
    bad.refuse_with = failure
    request = engine_request()
    assert as_seen(await fleet.ask(request)) == undisturbed(request)
    assert [len(bad.requests), len(good.requests)] == [1, 1]
    assert [bad.requests[0].attempt, good.requests[0].attempt] == [0, 1]
    assert not good.requests[0].HasField("continuation")
    await fleet.until_idle()
    assert bool(fleet.member("bad").breaker.consecutive_failures) == charged


@pytest.mark.parametrize(
    "failure",
    [
        errors.InvalidArgumentError.for_field("sampling.top_p", "must be above 0"),
        errors.FailedPreconditionError("stuck", reason="CONSTRAINT_UNSATISFIABLE"),
        errors.CancelledError("aborted by an operator"),
    ],
)
async def test_the_requests_own_fault_reaches_the_client_and_is_never_charged(
    fleet, engine_request, failure
):
    bad, good = await fleet.add("bad"), await fleet.add("good")
    fleet.index.holds(bad, 4)
    bad.refuse_with = failure
    with pytest.raises(type(failure)) as caught:
        await fleet.ask(engine_request())
    assert caught.value.message == failure.message
    assert caught.value.violations == failure.violations
    assert not good.requests
    await fleet.until_idle()
    assert fleet.member("bad").breaker.consecutive_failures == 0


async def test_all_engines_failing_is_unavailable_with_a_hint(fleet, engine_request):
    for name in ("a", "b"):
        (await fleet.add(name)).break_after = 0
    with pytest.raises(errors.UnavailableError) as caught:
        await fleet.ask(engine_request())
    assert caught.value.retry_after_s > 0
    assert sum(len(engine.requests) for engine in fleet.engines) == 3  # max_attempts
    await fleet.until_idle()


async def test_attempts_are_bounded(fleet, engine_request):
    for number in range(5):
        (await fleet.add(f"e{number}")).refuse_with = errors.InternalError("poison")
    with pytest.raises(errors.InternalError, match="poison"):
        await fleet.ask(engine_request())
    assert sum(len(engine.requests) for engine in fleet.engines) == 3


@pytest.mark.parametrize("cut", range(1, 13))
async def test_a_stream_cut_anywhere_looks_undisturbed(
    fleet, engine_request, as_seen, undisturbed, cut
):
    first, second = await fleet.add("a"), await fleet.add("b")
    fleet.index.holds(first, 4)
    first.break_after = cut
    request = engine_request(n=2)
    messages = await fleet.ask(request)
    assert as_seen(messages) == undisturbed(request)
    summary = messages[-1].summary
    assert summary.exact
    if cut == 11:  # Only the Summary was missing: no engine is needed for it.
        assert not second.requests
        return
    carried = [r for r in second.requests if r.HasField("continuation")]
    assert len(carried) == (1 if 1 < cut < 12 else 0)
    assert summary.continuations == len(carried)
    if carried:
        assert carried[0].attempt == 1
        assert carried[0].numerics_id == "n1"
    await fleet.until_idle()


@pytest.mark.parametrize("old", ["first", "second", "both"])
async def test_engines_of_the_version_before_resume_streams_and_have_theirs_resumed(
    fleet, engine_request, as_seen, undisturbed, old
):
    """They serve only Run; streams of this version share one RunMany call."""
    first = await fleet.add("a", serves_many=old == "second")
    second = await fleet.add("b", serves_many=old == "first")
    fleet.index.holds(first, 4)
    first.break_after = 4
    request = engine_request(n=2)
    assert as_seen(await fleet.ask(request)) == undisturbed(request)
    assert [len(engine.requests) for engine in (first, second)] == [1, 1]
    assert [len(engine.carrier_metadata) for engine in (first, second)] == {
        "first": [0, 1],
        "second": [1, 0],
        "both": [0, 0],
    }[old]
    await fleet.until_idle()


async def test_a_stream_outlives_more_faults_than_there_are_engines(
    fleet, engine_request, as_seen, undisturbed
):
    first, second = await fleet.add("a"), await fleet.add("b")
    first.break_after = second.break_after = 3  # of each attempt: Started and two tokens
    request = engine_request(max_tokens=8)
    messages = await fleet.ask(request)
    assert as_seen(messages) == undisturbed(request)
    assert messages[-1].summary.continuations >= 3
    assert len(first.requests) >= 2
    assert len(second.requests) >= 2
    await fleet.until_idle()


@pytest.mark.parametrize("cut", [0, 3])
async def test_the_only_engine_has_its_stream_again_after_a_cut_connection(
    fleet, engine_request, as_seen, undisturbed, wait_until, cut
):
    only = await fleet.add("only")
    only.break_after = cut
    request = engine_request()
    asking = asyncio.create_task(fleet.ask(request))
    await wait_until(lambda: only.requests and not only.running, "the connection to break")
    only.break_after = None
    assert as_seen(await asking) == undisturbed(request)
    assert [request.attempt for request in only.requests] == [0, 1]
    await fleet.until_idle()


@pytest.mark.parametrize("fleet", [{"carry_on_wait_s": 1.0}], indirect=True)
async def test_the_only_engine_is_not_tried_again_after_an_error_of_its_own(fleet, engine_request):
    only = await fleet.add("only")
    only.break_after, only.break_with = 3, errors.InternalError("bug")
    with pytest.raises(errors.AbortedError):
        await fleet.ask(engine_request())
    assert len(only.requests) == 1


async def test_other_numerics_do_not_resume(fleet, engine_request):
    first = await fleet.add("a")
    other = await fleet.add("b", numerics_id="n2")
    fleet.index.holds(first, 4)
    first.break_after = 3
    call = fleet.run(engine_request(), timeout=0.5)
    with pytest.raises(grpc.RpcError):
        _ = [message async for message in call]
    assert not other.requests


@pytest.mark.parametrize("fleet", [{"carry_on_wait_s": 0.1}], indirect=True)
async def test_a_stream_without_an_engine_to_resume_it_is_aborted_with_counts(
    fleet, engine_request
):
    first = await fleet.add("a")
    await fleet.add("b", numerics_id="n2")
    fleet.index.holds(first, 4)
    first.break_after = 3
    with pytest.raises(errors.AbortedError) as caught:
        await fleet.ask(engine_request())
    assert caught.value.metadata["completion_tokens"] == "2"
    assert caught.value.metadata["prompt_tokens"] == "20"
    await fleet.until_idle()


@pytest.mark.parametrize("fleet", [{"carry_on": "any"}], indirect=True)
async def test_by_policy_other_numerics_carry_on_and_it_is_said(fleet, engine_request):
    first = await fleet.add("a")
    await fleet.add("b", numerics_id="n2")
    fleet.index.holds(first, 4)
    first.break_after = 3
    messages = await fleet.ask(engine_request())
    assert messages[-1].summary.continuations == 1
    assert not messages[-1].summary.exact


async def test_a_broken_stream_waits_for_an_engine_to_come_back(
    fleet, engine_request, as_seen, undisturbed, wait_until
):
    first = await fleet.add("a")
    first.break_after = 3
    request = engine_request()
    asking = asyncio.create_task(fleet.ask(request))
    await fleet.until_state("a", "serving")
    await wait_until(lambda: first.requests, "the first engine has the request")
    await fleet.add("b")
    assert as_seen(await asking) == undisturbed(request)


async def test_a_stream_that_ends_early_is_carried_on(fleet, engine_request, as_seen, undisturbed):
    first = await fleet.add("a")
    await fleet.add("b")
    fleet.index.holds(first, 4)
    first.end_early = True
    request = engine_request()
    assert as_seen(await fleet.ask(request)) == undisturbed(request)


@pytest.mark.parametrize("fleet", [{"stall_limit_s": 0.3, "patience_s": 0.1}], indirect=True)
async def test_a_slow_engine_keeps_its_streams_while_nobody_else_could_take_them(
    fleet, engine_request, as_seen, undisturbed, wait_until
):
    slow = await fleet.add("slow")
    slow.hang_after = 0
    request = engine_request()
    asking = asyncio.create_task(fleet.ask(request))
    await wait_until(lambda: slow.requests, "the engine has it")
    slow.load.running_requests = 1
    slow.load.last_progress_age_s = 60
    await fleet.until_state("slow", "stalled")
    await asyncio.sleep(0.5)  # several sweeps
    assert not asking.done()
    await fleet.add("quick")
    assert as_seen(await asking) == undisturbed(request)


@pytest.mark.parametrize("fleet", [{"stall_limit_s": 0.5}], indirect=True)
@pytest.mark.parametrize("hang_after", [0, 3])
async def test_an_engine_without_progress_is_given_up(
    fleet, engine_request, as_seen, undisturbed, wait_until, hang_after
):
    first, second = await fleet.add("a"), await fleet.add("b")
    fleet.index.holds(first, 4)
    first.hang_after = hang_after
    request = engine_request()
    asking = asyncio.create_task(fleet.ask(request))
    await wait_until(lambda: first.requests, "the first engine has the request")
    first.load.running_requests = 1
    first.load.last_progress_age_s = 60
    assert as_seen(await asking) == undisturbed(request)
    assert fleet.state("a") == "stalled"
    assert len(second.requests) == 1
    first.load.running_requests = 0
    first.load.last_progress_age_s = 0
    await fleet.until_state("a", "serving")
    await fleet.until_idle()


@pytest.mark.parametrize("fleet", [{"stall_limit_s": 0.5}], indirect=True)
async def test_an_idle_engine_with_a_stopped_core_is_found_by_the_requests_sent_to_it(
    fleet, engine_request, as_seen, undisturbed
):
    frozen, other = await fleet.add("a"), await fleet.add("b")
    fleet.index.holds(frozen, 4)
    frozen.stop_core()
    request = engine_request()
    assert as_seen(await fleet.ask(request)) == undisturbed(request)
    assert (len(frozen.requests), len(other.requests)) == (1, 1)
    await fleet.until_idle()
    for number in range(3):  # its streams have left, and that is no sign of health
        again = engine_request(request_id=f"again-{number}")
        assert as_seen(await fleet.ask(again)) == undisturbed(again)
        await asyncio.sleep(0.2)  # several sweeps and reports
    assert len(frozen.requests) == 1
    status = await fleet.admin().ListEngines(fleet_pb2.ListEnginesRequest())
    assert {engine.info.engine_id: engine.state for engine in status.engines}["a"] == "stalled"
    frozen.continue_core()
    await fleet.until_state("a", "serving")
    await fleet.ask(engine_request(request_id="r9"))
    assert len(frozen.requests) == 2


async def test_a_stream_resumed_from_another_balancer_is_resumed_again(
    fleet, engine_request, as_seen, undisturbed
):
    first, second = await fleet.add("a"), await fleet.add("b")
    fleet.index.holds(first, 4)
    whole = undisturbed(engine_request())
    sent = "".join(f"{token} " for token in whole["ids"][0][:2])
    request = engine_request()
    request.attempt, request.numerics_id = 5, "n1"
    request.continuation.choices.add(
        index=0, token_ids=whole["ids"][0][:2], sent_text_bytes=len(sent)
    )
    first.break_after = 2
    seen = as_seen(await fleet.ask(request))
    assert first.requests[0] == request
    assert second.requests[0].attempt == 6
    assert list(second.requests[0].continuation.choices[0].token_ids) == whole["ids"][0][:3]
    assert seen["ids"][0] == whole["ids"][0][2:]
    assert sent + seen["text"][0] == whole["text"][0]


async def test_a_replaced_attempt_is_not_resumed(fleet, engine_request):
    first, second = await fleet.add("a"), await fleet.add("b")
    fleet.index.holds(first, 4)
    first.break_after, first.break_with = 3, errors.AbortedError("replaced", reason="REPLACED")
    with pytest.raises(errors.AbortedError, match="replaced"):
        await fleet.ask(engine_request())
    assert not second.requests


@pytest.mark.parametrize("fleet", [{"carry_on": "never"}], indirect=True)
async def test_never_means_never(fleet, engine_request):
    first, second = await fleet.add("a"), await fleet.add("b")
    fleet.index.holds(first, 4)
    first.break_after = 3
    with pytest.raises(errors.AbortedError):
        await fleet.ask(engine_request())
    assert not second.requests


async def test_an_engine_that_is_shut_down_is_not_a_client_that_left(
    fleet, engine_request, as_seen, undisturbed, wait_until
):
    first = await fleet.add("a")
    await fleet.add("b")
    fleet.index.holds(first, 4)
    first.hang_after = 3
    request = engine_request()
    asking = asyncio.create_task(fleet.ask(request))
    await wait_until(lambda: first.running, "the first engine has the request")
    await first.stop()
    assert as_seen(await asking) == undisturbed(request)
    await fleet.until_idle()
