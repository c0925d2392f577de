"""Spans and metrics of a request, whichever way it ends."""

import asyncio

import grpc
import httpx
import pytest
from opentelemetry.trace import SpanKind, StatusCode

from inferfleet_proto.v1 import inference_pb2
from services.common import errors
from tests.doubles.scripts import fail_with, hold_after_first

TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = f"00-{TRACE_ID}-00f067aa0ba902b7-01"


def chat(**fields):
    messages = [{"role": "user", "content": "hi"}]
    return inference_pb2.GenerateRequest(model="tiny", chat={"messages": messages}, **fields)


async def spans_of(gateway) -> dict:
    """By name, once the request's own span has been exported."""
    telemetry_of = gateway.service._telemetry
    async with asyncio.timeout(10):
        while True:
            await asyncio.to_thread(telemetry_of._provider.force_flush)
            found = {span.name: span for span in gateway.spans.get_finished_spans()}
            if any(span.kind is SpanKind.SERVER for span in found.values()):
                return found
            await asyncio.sleep(0.01)


async def test_one_span_with_its_children(gateway, stub, engine):
    metadata = (("traceparent", PARENT),)
    call = stub.Generate(chat(request_id="r1", sampling={"temperature": 0.5}), metadata=metadata)
    async for _ in call:
        pass
    spans = await spans_of(gateway)
    assert set(spans) == {"chat tiny", "render", "tokenize"}
    server = spans["chat tiny"]
    assert format(server.context.trace_id, "032x") == TRACE_ID
    assert format(server.parent.span_id, "016x") == "00f067aa0ba902b7"
    for child in ("render", "tokenize"):
        assert spans[child].parent.span_id == server.context.span_id
    usage = len(engine.reply.encode()) + 1
    assert server.attributes["gen_ai.operation.name"] == "chat"
    assert server.attributes["gen_ai.provider.name"] == "inferfleet"
    assert server.attributes["gen_ai.request.model"] == "tiny"
    assert server.attributes["gen_ai.request.temperature"] == 0.5
    assert server.attributes["gen_ai.usage.output_tokens"] == usage
    assert server.attributes["gen_ai.usage.cache_read.input_tokens"] == 3
    assert server.attributes["gen_ai.response.finish_reasons"] == ("EOS",)
    assert server.attributes["inferfleet.request_id"] == "r1"
    assert [event.name for event in server.events] == ["first_token"]
    assert server.status.status_code is StatusCode.UNSET
    sent = engine.metadata[0]["traceparent"].split("-")
    assert sent[1:3] == [TRACE_ID, format(server.context.span_id, "016x")]


@pytest.mark.parametrize("parent", ["rubbish", f"00-{TRACE_ID.upper()}-00f067aa0ba902b7-01", ""])
async def test_a_malformed_parent_is_a_new_trace(gateway, stub, engine, parent):
    call = stub.Generate(chat(), metadata=(("traceparent", parent),))
    async for _ in call:
        pass
    server = (await spans_of(gateway))["chat tiny"]
    assert server.parent is None
    assert format(server.context.trace_id, "032x") != TRACE_ID


async def test_an_unsampled_parent_leaves_no_span_and_is_passed_on(gateway, stub, engine):
    unsampled = (("traceparent", PARENT[:-2] + "00"),)
    call = stub.Generate(chat(), metadata=unsampled)
    async for _ in call:
        pass
    assert engine.metadata[0]["traceparent"].startswith(f"00-{TRACE_ID}-")
    assert engine.metadata[0]["traceparent"].endswith("-00")
    async for _ in stub.Generate(chat()):
        pass
    found = await spans_of(gateway)
    assert TRACE_ID not in {format(s.context.trace_id, "032x") for s in found.values()}


async def test_the_span_ends_when_a_client_leaves(gateway, stub, engine):
    engine.script = hold_after_first
    call = stub.Generate(chat())
    await call.read()
    await call.read()
    call.cancel()
    server = (await spans_of(gateway))["chat tiny"]
    assert server.status.status_code is StatusCode.ERROR
    assert server.attributes["error.type"] == "CANCELLED"


async def test_errors_are_the_spans_status(gateway, stub, engine):
    engine.script = fail_with(errors.AbortedError("engine lost"), after=2)
    with pytest.raises(grpc.aio.AioRpcError):
        async for _ in stub.Generate(chat()):
            pass
    server = (await spans_of(gateway))["chat tiny"]
    assert server.status.status_code is StatusCode.ERROR
    assert server.attributes["error.type"] == "STREAM_BROKEN"


async def test_the_http_face_makes_the_same_span(gateway, http):
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "stream": True}
    headers = {"TraceParent": PARENT, "baggage": "a=b"}
    response = await http.post("/v1/chat/completions", json=body, headers=headers)
    assert response.headers["x-trace-id"] == TRACE_ID
    server = (await spans_of(gateway))["chat tiny"]
    assert server.attributes["gen_ai.response.finish_reasons"] == ("EOS",)
    assert format(server.parent.span_id, "016x") == "00f067aa0ba902b7"


async def test_metrics_count_every_end(gateway, stub, engine):
    async for _ in stub.Generate(chat()):
        pass
    unknown = inference_pb2.GenerateRequest(model="made up", text="x")
    with pytest.raises(grpc.aio.AioRpcError):
        await stub.Complete(unknown)
    engine.script = hold_after_first
    running = stub.Generate(chat())
    await running.read()
    await running.read()
    async with httpx.AsyncClient(base_url=f"http://{gateway.metrics}") as client:
        text = (await client.get("/metrics")).text
        assert (await client.get("/healthz")).status_code == 200
    running.cancel()
    series = dict(line.rsplit(" ", 1) for line in text.splitlines() if line[0] != "#")
    labels = 'gen_ai_operation_name="chat",gen_ai_request_model="tiny"'
    assert series[f"gen_ai_server_time_to_first_token_seconds_count{{{labels}}}"] == "2.0"
    assert series[f"gen_ai_server_time_per_output_token_seconds_count{{{labels}}}"] == "1.0"
    duration = f'gen_ai_server_request_duration_seconds_count{{error_type="",{labels}}}'
    assert series[duration] == "1.0"
    assert series['inferfleet_gateway_requests_total{face="grpc",status="OK"}'] == "1.0"
    assert series['inferfleet_gateway_requests_total{face="grpc",status="NOT_FOUND"}'] == "1.0"
    assert series['inferfleet_gateway_in_flight{face="grpc"}'] == "1.0"
    assert "made up" not in text
