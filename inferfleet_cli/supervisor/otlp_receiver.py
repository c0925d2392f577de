"""An OTLP/gRPC receiver: the services of a local fleet export their traces to it."""

from collections.abc import Iterator
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.common.v1 import common_pb2
from opentelemetry.proto.trace.v1 import trace_pb2

from inferfleet_cli.supervisor.trace_store import Span, SpanEvent, TraceStore

MAX_MESSAGE_BYTES = 16 * 1024 * 1024


class OtlpReceiver(trace_service_pb2_grpc.TraceServiceServicer):
    """Serves opentelemetry.proto.collector.trace.v1.TraceService and stores the spans."""

    def __init__(self, store: TraceStore) -> None:
        self._store = store
        self._server: grpc.aio.Server | None = None

    async def start(self, address: str) -> str:
        """Listen on host:port (port 0 means a free one); returns the host:port in use."""
        options = [("grpc.max_receive_message_length", MAX_MESSAGE_BYTES), ("grpc.so_reuseport", 0)]
        self._server = grpc.aio.server(options=options)
        register: Any = trace_service_pb2_grpc.add_TraceServiceServicer_to_server
        register(self, self._server)
        port = self._server.add_insecure_port(address)
        await self._server.start()
        return f"{address.rpartition(':')[0]}:{port}"

    async def stop(self) -> None:
        """Close the port; idempotent."""
        if self._server is not None:
            await self._server.stop(grace=0.2)
            self._server = None

    async def Export(
        self,
        request: trace_service_pb2.ExportTraceServiceRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> trace_service_pb2.ExportTraceServiceResponse:
        """Store the spans of one batch."""
        self._store.add(spans_of(request))
        return trace_service_pb2.ExportTraceServiceResponse()


def spans_of(request: trace_service_pb2.ExportTraceServiceRequest) -> Iterator[Span]:
    """The spans of one export request, as a flat sequence."""
    for of_resource in request.resource_spans:
        resource = _attributes(of_resource.resource.attributes)
        for of_scope in of_resource.scope_spans:
            for span in of_scope.spans:
                yield _span(span, resource)


def _span(span: trace_pb2.Span, resource: dict[str, Any]) -> Span:
    failed = span.status.code == trace_pb2.Status.STATUS_CODE_ERROR
    return Span(
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_span_id=span.parent_span_id.hex(),
        name=span.name,
        service=str(resource.get("service.name", "")),
        start_ns=span.start_time_unix_nano,
        end_ns=span.end_time_unix_nano,
        error=(span.status.message or "error") if failed else "",
        attributes=_attributes(span.attributes),
        resource=resource,
        events=tuple(
            SpanEvent(event.name, event.time_unix_nano, _attributes(event.attributes))
            for event in span.events
        ),
    )


def _attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: common_pb2.AnyValue) -> Any:
    kind = value.WhichOneof("value")
    if kind is None:
        return None
    if kind == "array_value":
        return [_value(item) for item in value.array_value.values]
    if kind == "kvlist_value":
        return _attributes(value.kvlist_value.values)
    if kind == "bytes_value":
        return value.bytes_value.hex()
    return getattr(value, kind)
