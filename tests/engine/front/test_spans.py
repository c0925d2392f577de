"""The engine's part of a trace, with a real parent and the core's marks."""

import time

import grpc
import pytest

from inferfleet_proto.internal.v1 import engine_pb2
from services.engine.contract.messages import AddRequest, Load, Mark, RequestFailure

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = "00f067aa0ba902b7"
VERBS = ["enqueue", "admit", "submit", "collect", "release"]


def marks(key, start_ns, *verbs):
    return [
        Mark(key, verb, start_ns + index * 1_000_000, **detail)
        for index, (verb, detail) in enumerate(verbs)
    ]


async def run(front, run_request, out, metadata):
    call = front.engine.Run(run_request("traced"), metadata=metadata)
    key = (await front.core.got(AddRequest)).request_key
    start = time.time_ns()
    front.core.say(
        marks=marks(
            key,
            start,
            ("enqueue", {}),
            ("admit", {"cached_tokens": 2}),
            ("submit", {"start": 0, "tokens": 2}),
            ("submit", {"preempted": True, "lost_tokens": 2}),
            ("submit", {"start": 0, "tokens": 3}),
        )
    )
    front.core.say(
        out(key, "hi", "MAX_TOKENS", num_cached_tokens=2),
        marks=[
            Mark(key, "collect", start + 10_000_000, first=True),
            Mark(key, "collect", start + 20_000_000, end=True),
        ],
    )
    while not (await call.read()).HasField("summary"):
        pass
    assert await call.read() is grpc.aio.EOF
    front.core.say(marks=[Mark(key, "release", start + 30_000_000)])
    return start


async def test_five_verbs_under_one_server_span_under_the_caller_s(front, run_request, out):
    start = await run(front, run_request, out, (("traceparent", f"00-{TRACE}-{PARENT}-01"),))
    spans = await front.spans.by_name(6)
    server = spans["run"]
    assert format(server.context.trace_id, "032x") == TRACE
    assert format(server.parent.span_id, "016x") == PARENT
    assert server.kind.name == "SERVER"
    for verb in VERBS:
        assert spans[verb].parent.span_id == server.context.span_id
        assert spans[verb].attributes["inferfleet.request_id"] == "traced"
    ends = {verb: (spans[verb].end_time - start) // 1_000_000 for verb in VERBS}
    assert ends == {"enqueue": 0, "admit": 1, "submit": 10, "collect": 20, "release": 30}
    begins = [spans[verb].start_time for verb in VERBS]
    assert begins == [server.start_time, *(spans[verb].end_time for verb in VERBS[:-1])]
    assert start - 10**9 < server.start_time <= start
    events = spans["submit"].events
    assert [event.name for event in events] == ["chunk", "preempted", "chunk"]
    assert events[0].attributes["tokens"] == 2
    attributes = server.attributes
    assert attributes["inferfleet.engine_id"] == "engine-under-test"
    assert attributes["inferfleet.placement_version"] == 0
    assert attributes["gen_ai.request.model"] == "tiny"
    assert attributes["gen_ai.usage.input_tokens"] == 3
    assert attributes["gen_ai.usage.cache_read.input_tokens"] == 2
    assert attributes["gen_ai.usage.output_tokens"] == 2
    assert attributes["gen_ai.response.finish_reasons"] == ("MAX_TOKENS",)
    assert server.status.is_ok or server.status.status_code.name == "UNSET"


@pytest.mark.parametrize(
    "metadata",
    [(), (("traceparent", "garbage"),), (("traceparent", f"00-{'0' * 32}-{PARENT}-01"),)],
)
async def test_without_a_usable_parent_a_new_trace_begins(front, run_request, out, metadata):
    await run(front, run_request, out, metadata)
    spans = await front.spans.by_name(6)
    assert spans["run"].parent is None
    assert format(spans["run"].context.trace_id, "032x") != TRACE


async def test_what_the_caller_did_not_sample_is_not_recorded(front, run_request, out):
    await run(front, run_request, out, (("traceparent", f"00-{TRACE}-{PARENT}-00"),))
    front.core.say(load=Load(held_blocks=1))
    watch = front.engine.WatchLoad(engine_pb2.WatchLoadRequest())
    while (await watch.read()).held_blocks != 1:
        pass
    watch.cancel()
    assert not front.spans.get_finished_spans()


async def test_failures_and_leavers_are_marked(front, run_request, out):
    call = front.engine.Run(run_request("failed"))
    key = (await front.core.got(AddRequest)).request_key
    front.core.say(failures=[RequestFailure(key, "DATA_LOSS", "NAN_LOGITS", "not finite")])
    with pytest.raises(grpc.aio.AioRpcError):
        await call.read()
    failed = (await front.spans.by_name(1))["run"]
    assert failed.status.status_code.name == "ERROR"
    assert "DATA_LOSS" in failed.status.description
    front.spans.clear()

    call = front.engine.Run(run_request("left"))
    await front.core.got(AddRequest, 2)
    call.cancel()
    left = (await front.spans.by_name(1))["run"]
    assert left.status.description.startswith("CANCELLED")
