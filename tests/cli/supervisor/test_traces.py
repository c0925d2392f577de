"""Traces: received over real OTLP, bounded, found by request id, drawn as a tree."""

import pytest
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.trace import Status, StatusCode, set_span_in_context

from inferfleet_cli.demo import missing_from
from inferfleet_cli.supervisor.otlp_receiver import OtlpReceiver
from inferfleet_cli.supervisor.trace_json import trace_json
from inferfleet_cli.supervisor.trace_store import REQUEST_ID, Span, TraceStore
from inferfleet_cli.waterfall import chart, seconds_by_step

MS = 1_000_000


def span(span_id, parent="", name="x", service="gateway", start=0, end=1, trace="t1", **attributes):
    return Span(
        trace_id=trace,
        span_id=span_id,
        parent_span_id=parent,
        name=name,
        service=service,
        start_ns=start * MS,
        end_ns=end * MS,
        attributes=attributes,
    )


def request_spans():
    return [
        span("e", "b", "run", "engine", 3, 99, **{"inferfleet.engine_id": "engine-2"}),
        span("v2", "e", "admit", "engine", 5, 6),
        span("v1", "e", "enqueue", "engine", 3, 5),
        span("b", "g", "route", "balancer", 2, 100),
        span("g", "client", "chat tiny", "gateway", 0, 101, **{REQUEST_ID: "r-1"}),
    ]


async def test_a_span_sent_by_the_real_exporter_arrives_whole():
    import asyncio

    store = TraceStore()
    receiver = OtlpReceiver(store)
    address = await receiver.start("127.0.0.1:0")
    provider = TracerProvider(resource=Resource({"service.name": "engine"}), shutdown_on_exit=False)
    exporter = OTLPSpanExporter(endpoint=f"http://{address}", insecure=True)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracer = provider.get_tracer("test")

    def send():
        parent = tracer.start_span("run", attributes={REQUEST_ID: "r-9", "n": 3, "s": ["a", "b"]})
        child = tracer.start_span("submit", context=set_span_in_context(parent))
        child.add_event("chunk", {"tokens": 7})
        child.set_status(Status(StatusCode.ERROR, "broke"))
        child.end()
        parent.end()
        provider.shutdown()

    await asyncio.to_thread(send)
    found = store.find("r-9")
    await receiver.stop()
    parent, child = sorted(found, key=lambda one: one.name)
    assert (parent.name, parent.service) == ("run", "engine")
    assert parent.attributes == {REQUEST_ID: "r-9", "n": 3, "s": ["a", "b"]}
    assert child.parent_span_id == parent.span_id
    assert child.error == "broke"
    assert (child.events[0].name, child.events[0].attributes) == ("chunk", {"tokens": 7})
    assert store.find(parent.trace_id) == found


def test_the_store_forgets_the_oldest_trace_and_its_request_id():
    store = TraceStore(max_traces=2)
    for number in range(3):
        store.add([span("s", trace=f"t{number}", **{REQUEST_ID: f"r{number}"})])
    assert len(store) == 2
    assert store.find("r0") == []
    assert [one.trace_id for one in store.find("r2")] == ["t2"]


def test_a_request_id_used_again_names_the_newer_trace_even_when_the_older_goes():
    store = TraceStore(max_traces=1)
    store.add([span("a", trace="t1", **{REQUEST_ID: "r"})])
    store.add([span("b", trace="t2", **{REQUEST_ID: "r"})])
    assert [one.span_id for one in store.find("r")] == ["b"]


def test_one_trace_cannot_grow_without_bound(monkeypatch):
    monkeypatch.setattr("inferfleet_cli.supervisor.trace_store.MAX_SPANS_PER_TRACE", 3)
    store = TraceStore()
    store.add(span(str(number)) for number in range(10))
    assert len(store.find("t1")) == 3


def test_parents_come_before_children_and_spans_know_their_engine():
    trace = trace_json(request_spans())
    rows = [(one["name"], one["depth"], one["instance"]) for one in trace["spans"]]
    assert rows == [
        ("chat tiny", 0, "gateway"),
        ("route", 1, "balancer"),
        ("run", 2, "engine-2"),
        ("enqueue", 3, "engine-2"),
        ("admit", 3, "engine-2"),
    ]
    assert trace["request_id"] == "r-1"
    assert trace["duration_s"] == pytest.approx(0.101)


def test_the_chart_places_each_bar_on_the_time_line():
    lines = chart(trace_json(request_spans()), ascii_only=True).splitlines()
    assert lines[0] == "request r-1   trace t1"
    assert lines[1].split("|")[1] == "#" * 36
    enqueue = lines[4].split("|")[1]
    assert enqueue.startswith(" #")
    assert enqueue.count("#") == 1
    assert lines[4].endswith("2.0 ms")


def test_a_trace_is_whole_when_every_span_hangs_on_the_gateway():
    spans = trace_json(request_spans())["spans"]
    assert missing_from(spans) == "submit"
    spans += [{**spans[-1], "name": verb} for verb in ("submit", "collect", "release")]
    assert missing_from(spans) is None
    without_route = [span for span in spans if span["name"] != "route"]
    assert missing_from(without_route) == "span that joins the services"
    assert missing_from([]) == "enqueue"


def test_verbs_add_up_over_attempts_and_keep_their_order():
    spans = [*request_spans(), span("v3", "e", "enqueue", "engine", 7, 8)]
    assert seconds_by_step(trace_json(spans)) == pytest.approx({"enqueue": 0.003, "admit": 0.001})
