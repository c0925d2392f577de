"""Requests over real sockets through a balancer to engines that answer, refuse, hang and die."""

import asyncio

import grpc
import pytest

from inferfleet.admin.v1 import fleet_pb2
from inferfleet.internal.v1 import engine_pb2
from services.common import errors
from services.common.rpc import ENGINE_ID_KEY, REQUEST_ID_KEY


async def test_a_stream_passes_byte_for_byte(fleet, engine_request, as_seen, undisturbed):
    engine = await fleet.add("a")
    request = engine_request(n=2)
    call = fleet.run(request)
    messages = [message async for message in call]
    assert as_seen(messages) == undisturbed(request)
    assert engine.requests[0].SerializeToString() == request.SerializeToString()
    metadata = dict(await call.initial_metadata())
    assert metadata[ENGINE_ID_KEY] == "a"
    assert metadata[REQUEST_ID_KEY] == "r1"
    await fleet.until_idle()
    assert fleet.metric("inferfleet_balancer_requests_total", model="tiny", status="OK") == 1


async def test_the_trace_goes_through(fleet, engine_request):
    engine = await fleet.add("a")
    parent = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
    await fleet.ask(engine_request(), metadata=(("traceparent", parent),))
    await fleet.until_idle()
    spans = {span.name: span for span in fleet.spans.get_finished_spans()}
    route, match = spans["route"], spans["match"]
    assert format(route.context.trace_id, "032x") == "4bf92f3577b34da6a3ce929d0e0e4736"
    assert format(route.parent.span_id, "016x") == "00f067aa0ba902b7"
    assert match.parent.span_id == route.context.span_id
    assert match.kind.name == "CLIENT"
    assert route.attributes["inferfleet.route.engine_id"] == "a"
    assert route.attributes["inferfleet.request_id"] == "r1"
    told = engine.metadata[0]["traceparent"].split("-")
    assert told[1] == "4bf92f3577b34da6a3ce929d0e0e4736"
    assert told[2] == format(route.context.span_id, "016x")


async def test_a_prefix_is_followed_to_its_holder(fleet, engine_request):
    await fleet.add("a")
    holder = await fleet.add("b")
    fleet.index.holds(holder, 4)
    for number in range(6):
        await fleet.ask(engine_request(request_id=f"r{number}"))
    assert len(holder.requests) == 6
    assert len(fleet.index.requests) == 6, "one Match per request"
    # 20 tokens in blocks of 4, but the last token is always computed.
    assert len(fleet.index.requests[0].block_hashes) == 4 * 16


@pytest.mark.parametrize("fleet", [{"match_timeout_s": 0.02}], indirect=True)
async def test_a_slow_index_costs_its_deadline_and_then_nothing(fleet, engine_request):
    await fleet.add("a")
    fleet.index.delay_s = 30
    for _ in range(8):
        await fleet.ask(engine_request())
    assert len(fleet.index.requests) <= 4, "the breaker spares the rest"
    story = fleet.service.rooms.decisions.explain("r1")
    assert not story.decisions[0].match_known


async def test_bypass_asks_no_index(fleet, engine_request):
    await fleet.add("a")
    await fleet.ask(engine_request(bypass=True))
    assert not fleet.index.requests


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
    assert bool(fleet.service.rooms.registry.member("bad").breaker._in_a_row) == charged


@pytest.mark.parametrize(
    "failure",
    [
        errors.InvalidArgumentError.for_field("sampling.top_p", "must be above 0"),
        errors.FailedPreconditionError("stuck", reason="CONSTRAINT_UNSATISFIABLE"),
        errors.CancelledError("aborted by an operator"),
    ],
)
async def test_the_requests_own_fault_is_told_and_never_charged(fleet, engine_request, failure):
    bad, good = await fleet.add("bad"), await fleet.add("good")
    fleet.index.holds(bad, 4)
    bad.refuse_with = failure
    with pytest.raises(type(failure)) as caught:
        await fleet.ask(engine_request())
    assert caught.value.message == failure.message
    assert caught.value.violations == failure.violations
    assert not good.requests
    await fleet.until_idle()
    assert fleet.service.rooms.registry.member("bad").breaker._in_a_row == 0


async def test_all_engines_failing_is_unavailable_with_a_hint(fleet, engine_request):
    for name in ("a", "b"):
        (await fleet.add(name)).break_after = 0
    with pytest.raises(errors.UnavailableError) as caught:
        await fleet.ask(engine_request())
    assert caught.value.retry_after_s > 0
    assert sum(len(engine.requests) for engine in fleet.engines) == 2
    await fleet.until_idle()


async def test_attempts_are_bounded(fleet, engine_request):
    for number in range(5):
        (await fleet.add(f"e{number}")).refuse_with = errors.InternalError("poison")
    with pytest.raises(errors.InternalError, match="poison"):
        await fleet.ask(engine_request())
    assert sum(len(engine.requests) for engine in fleet.engines) == 3


async def test_unknown_model_is_not_found(fleet, engine_request):
    await fleet.add("a")
    with pytest.raises(errors.NotFoundError) as caught:
        await fleet.ask(engine_request(model="other"))
    assert caught.value.reason == "MODEL_NOT_FOUND"
    await fleet.until_idle()


@pytest.mark.parametrize("fleet", [{"patience_s": 0.1}], indirect=True)
async def test_no_engine_yet_is_unavailable(fleet, engine_request):
    with pytest.raises(errors.UnavailableError) as caught:
        await fleet.ask(engine_request())
    assert caught.value.retry_after_s > 0
    await fleet.until_idle()


async def test_each_model_goes_to_its_engines(fleet, engine_request):
    first, second = await fleet.add("a"), await fleet.add("b", model="other")
    await fleet.ask(engine_request(model="other"))
    await fleet.ask(engine_request())
    assert [len(first.requests), len(second.requests)] == [1, 1]


@pytest.mark.parametrize("field", ["request.model", "request.token_ids"])
async def test_what_the_gateway_forgot_is_named(fleet, engine_request, field):
    await fleet.add("a")
    change = {"model": ""} if field == "request.model" else {"prompt": []}
    with pytest.raises(errors.InvalidArgumentError) as caught:
        await fleet.ask(engine_request(**change))
    assert caught.value.violations[0].field == field


async def test_malformed_bytes_are_invalid(fleet):
    await fleet.add("a")
    async with grpc.aio.insecure_channel(fleet.service.address) as channel:
        call = channel.unary_stream("/inferfleet.internal.v1.Engine/Run")(b"\xff\xff\xff")
        with pytest.raises(grpc.RpcError) as caught:
            _ = [message async for message in call]
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_client_that_leaves_cancels_the_engine(fleet, engine_request, wait_until):
    engine = await fleet.add("a")
    engine.hang_after = 2
    call = fleet.run(engine_request())
    assert await call.read() is not grpc.aio.EOF
    assert fleet.in_flight() == 1
    call.cancel()
    await wait_until(lambda: engine.running == 0, "the engine was told")
    await fleet.until_idle()
    assert fleet.service.rooms.registry.member("a").breaker._in_a_row == 0


async def test_the_deadline_reaches_the_engine(fleet, engine_request, wait_until):
    engine = await fleet.add("a")
    engine.hang_after = 0
    with pytest.raises(errors.DeadlineExceededError):
        await fleet.ask(engine_request(), timeout=0.3)
    await wait_until(lambda: engine.running == 0, "the engine was told")
    await fleet.until_idle()


async def test_counts_survive_load_reports(fleet, engine_request, wait_until):
    engine = await fleet.add("a", max_num_seqs=100)
    engine.hang_after = 1
    calls = [fleet.run(engine_request(request_id=f"r{i}")) for i in range(20)]
    await wait_until(lambda: fleet.in_flight() == 20, "all there")
    seen = engine.load.sequence
    await wait_until(lambda: engine.load.sequence > seen + 10, "ten reports")
    assert fleet.in_flight() == 20
    assert fleet.metric("inferfleet_balancer_in_flight", engine="a") == 20
    for call in calls:
        call.cancel()
    await fleet.until_idle()
    assert fleet.metric("inferfleet_balancer_in_flight", engine="a") == 0


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
    if cut == 11:  # Only the Summary was missing: nobody need be asked.
        assert not second.requests
        return
    carried = [r for r in second.requests if r.HasField("continuation")]
    assert len(carried) == (1 if 1 < cut < 12 else 0)
    assert summary.continuations == len(carried)
    if carried:
        assert carried[0].attempt == 1
        assert carried[0].numerics_id == "n1"
    await fleet.until_idle()


async def test_other_numerics_do_not_carry_on(fleet, engine_request):
    first = await fleet.add("a")
    other = await fleet.add("b", numerics_id="n2")
    fleet.index.holds(first, 4)
    first.break_after = 3
    call = fleet.run(engine_request(), timeout=0.5)
    with pytest.raises(grpc.RpcError):
        _ = [message async for message in call]
    assert not other.requests


@pytest.mark.parametrize("fleet", [{"carry_on_wait_s": 0.1}], indirect=True)
async def test_nobody_to_carry_on_is_aborted_with_counts(fleet, engine_request):
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
    await wait_until(lambda: first.requests, "the first engine has it")
    await fleet.add("b")
    assert as_seen(await asking) == undisturbed(request)


async def test_a_stream_that_ends_early_is_carried_on(fleet, engine_request, as_seen, undisturbed):
    first = await fleet.add("a")
    await fleet.add("b")
    fleet.index.holds(first, 4)
    first.end_early = True
    request = engine_request()
    assert as_seen(await fleet.ask(request)) == undisturbed(request)


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
    await wait_until(lambda: first.requests, "the first engine has it")
    first.load.running_requests = 1
    first.load.last_progress_age_s = 60
    assert as_seen(await asking) == undisturbed(request)
    assert fleet.state("a") == "stalled"
    assert len(second.requests) == 1
    first.load.running_requests = 0
    first.load.last_progress_age_s = 0
    await fleet.until_state("a", "serving")
    await fleet.until_idle()


async def test_a_stream_carried_on_from_another_balancer_is_carried_on_again(
    fleet, engine_request, as_seen, undisturbed
):
    first, second = await fleet.add("a"), await fleet.add("b")
    fleet.index.holds(first, 4)
    whole = undisturbed(engine_request())
    said = "".join(f"{token} " for token in whole["ids"][0][:2])
    request = engine_request()
    request.attempt, request.numerics_id = 5, "n1"
    request.continuation.choices.add(
        index=0, token_ids=whole["ids"][0][:2], sent_text_bytes=len(said)
    )
    first.break_after = 2
    seen = as_seen(await fleet.ask(request))
    assert first.requests[0] == request
    assert second.requests[0].attempt == 6
    assert list(second.requests[0].continuation.choices[0].token_ids) == whole["ids"][0][:3]
    assert seen["ids"][0] == whole["ids"][0][2:]
    assert said + seen["text"][0] == whole["text"][0]


async def test_a_replaced_attempt_is_not_carried_on(fleet, engine_request):
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


async def test_two_revisions_are_matched_by_their_own_hashes(fleet, engine_request):
    await fleet.add("a")
    await fleet.add("b", hash_namespace=b"another")
    await fleet.ask(engine_request())
    chains = {request.block_hashes for request in fleet.index.requests}
    assert len(chains) == len(fleet.index.requests) == 2


async def test_tenants_never_share_hashes(fleet, engine_request):
    await fleet.add("a")
    request = engine_request()
    await fleet.ask(request)
    request.salt = b"salt"
    await fleet.ask(request)
    assert fleet.index.requests[0].block_hashes != fleet.index.requests[1].block_hashes


async def test_explain_tells_the_story(fleet, engine_request):
    first = await fleet.add("a")
    await fleet.add("b")
    fleet.index.holds(first, 4)
    first.refuse_with = errors.InternalError("bug")
    await fleet.ask(engine_request())
    await fleet.until_idle()
    admin = fleet.admin()
    story = await admin.Explain(fleet_pb2.ExplainRequest(request_id="r1"))
    assert [d.engine_id for d in story.decisions] == ["a", "b"]
    assert [d.outcome for d in story.decisions] == ["INTERNAL", "OK"]
    assert [d.attempt for d in story.decisions] == [0, 1]
    by_id = {c.engine_id: c for c in story.decisions[0].candidates}
    assert by_id["a"].matched_tokens == 16
    assert by_id["a"].expected_s == pytest.approx(sum(by_id["a"].parts.values()))
    assert by_id["a"].expected_s < by_id["b"].expected_s
    with pytest.raises(grpc.RpcError) as caught:
        await admin.Explain(fleet_pb2.ExplainRequest(request_id="nobody"))
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_a_drained_engine_gets_no_more(fleet, engine_request):
    first, second = await fleet.add("a"), await fleet.add("b")
    fleet.index.holds(first, 4)
    admin = fleet.admin()
    await admin.Drain(fleet_pb2.DrainEngineRequest(engine_id="a", grace_s=1))
    listed = await admin.ListEngines(fleet_pb2.ListEnginesRequest())
    assert {e.info.engine_id: e.state for e in listed.engines} == {"a": "draining", "b": "serving"}
    await fleet.ask(engine_request())
    assert [len(first.requests), len(second.requests)] == [0, 1]


async def test_a_drain_that_fails_still_takes_the_engine_out(fleet):
    engine = await fleet.add("a")
    engine.drain_with = errors.InternalError("stuck")
    admin = fleet.admin()
    with pytest.raises(grpc.RpcError, match="out of routing"):
        await admin.Drain(fleet_pb2.DrainEngineRequest(engine_id="a"))
    assert fleet.state("a") == "draining"
    for request, code in (
        (fleet_pb2.DrainEngineRequest(engine_id="zzz"), grpc.StatusCode.NOT_FOUND),
        (fleet_pb2.DrainEngineRequest(engine_id="a", grace_s=-1), grpc.StatusCode.INVALID_ARGUMENT),
    ):
        with pytest.raises(grpc.RpcError) as caught:
            await admin.Drain(request)
        assert caught.value.code() is code


async def test_only_run_is_served(fleet):
    async with grpc.aio.insecure_channel(fleet.service.address) as channel:
        call = channel.unary_unary("/inferfleet.internal.v1.Engine/GetInfo")
        with pytest.raises(grpc.RpcError) as caught:
            await call(engine_pb2.GetInfoRequest().SerializeToString())
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
