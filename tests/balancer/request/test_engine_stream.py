"""Requests over real sockets through a balancer to engines that answer, refuse, hang and die."""

import grpc
import pytest

from inferfleet_proto.internal.v1 import engine_pb2
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
    received = engine.metadata[0]["traceparent"].split("-")
    assert received[1] == "4bf92f3577b34da6a3ce929d0e0e4736"
    assert received[2] == format(route.context.span_id, "016x")


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
    found = fleet.service.dependencies.decisions.explain("r1")
    assert not found.decisions[0].match_known


async def test_bypass_calls_no_index(fleet, engine_request):
    await fleet.add("a")
    await fleet.ask(engine_request(bypass=True))
    assert not fleet.index.requests


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
async def test_a_field_that_the_gateway_left_empty_is_named(fleet, engine_request, field):
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
    await wait_until(lambda: engine.running == 0, "the call at the engine ends")
    await fleet.until_idle()
    assert fleet.member("a").breaker.consecutive_failures == 0


async def test_the_deadline_reaches_the_engine(fleet, engine_request, wait_until):
    engine = await fleet.add("a")
    engine.hang_after = 0
    with pytest.raises(errors.DeadlineExceededError):
        await fleet.ask(engine_request(), timeout=0.3)
    await wait_until(lambda: engine.running == 0, "the call at the engine ends")
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


async def test_only_run_is_served(fleet):
    async with grpc.aio.insecure_channel(fleet.service.address) as channel:
        call = channel.unary_unary("/inferfleet.internal.v1.Engine/GetInfo")
        with pytest.raises(grpc.RpcError) as caught:
            await call(engine_pb2.GetInfoRequest().SerializeToString())
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
