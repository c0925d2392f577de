"""Serves Engine/Run and Engine/RunMany: bytes in, bytes out, one `route` span per stream."""

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

import grpc
from opentelemetry import trace

from inferfleet_proto.internal.v1 import engine_pb2
from services.balancer.engines.engine_view import RoutingRequest
from services.balancer.metrics import BalancerMetrics
from services.balancer.request.dependencies import Dependencies
from services.balancer.request.engine_stream import EngineStream
from services.balancer.request.incoming import Incoming, parse, routing_request
from services.common import errors
from services.common.rpc import REQUEST_ID_KEY
from services.common.rpc.carrier import RunContext, RunMany
from services.common.service import telemetry

SERVICE_NAME = "inferfleet.internal.v1.Engine"


class RunServicer:
    """Serves Run, alone or carried in RunMany, and no other method of the Engine service.

    Args:
        tracer: the tracer of this service.
    """

    def __init__(self, deps: Dependencies, tracer: trace.Tracer) -> None:
        self._deps = deps
        self._tracer = tracer
        self._draining = False
        self._running: set[EngineStream] = set()
        self._many = RunMany(self.Run, parse=parse)
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def draining(self) -> bool:
        """Whether new calls are refused."""
        return self._draining

    @property
    def running(self) -> int:
        """Streams that are being served."""
        return len(self._running)

    def handler(self) -> Any:
        """The handler for `server.add_generic_rpc_handlers`. Responses are bytes already."""
        run: Any = grpc.unary_stream_rpc_method_handler(self.Run, request_deserializer=parse)
        many: Any = grpc.stream_stream_rpc_method_handler(
            self._many,
            request_deserializer=engine_pb2.RunFrames.FromString,
            response_serializer=engine_pb2.AnswerFrames.SerializeToString,
        )
        return grpc.method_handlers_generic_handler(SERVICE_NAME, {"Run": run, "RunMany": many})

    async def drain(self) -> None:
        """Refuse new calls and return when the running ones have ended."""
        self._draining = True
        await self._idle.wait()

    async def interrupt(self, patience_s: float) -> None:
        """End the running streams with a status; wait up to `patience_s` until callers have it."""
        self._draining = True
        for stream in list(self._running):
            stream.interrupt()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), patience_s)
        await self._many.close(patience_s)

    async def Run(self, incoming: Incoming, context: RunContext) -> None:
        """Route one request and forward the stream of the engines that answer it."""
        if self._draining:
            raise errors.UnavailableError(
                "the balancer is draining", reason="DRAINING", retry_after_s=1.0
            )
        request = routing_request(incoming.request)
        telemetry.request_id_var.set(request.request_id)
        span = self._start_span(request, context)
        stream = EngineStream(self._deps, incoming, request, context, span)
        self._running.add(stream)
        self._idle.clear()
        run = _OpenRun(stream, request, span, self._deps.metrics, self._forget)
        done: Any = run.close
        context.add_done_callback(done)
        try:
            await stream.run(context.write)
            run.succeed()
        except errors.FleetError as error:
            run.fail(error)
            if not stream.metadata_sent:
                await context.send_initial_metadata(((REQUEST_ID_KEY, request.request_id),))
            raise
        finally:
            run.close()

    def _start_span(self, request: RoutingRequest, context: RunContext) -> trace.Span:
        return self._tracer.start_span(
            "route",
            context=telemetry.extract(context.invocation_metadata()),
            kind=trace.SpanKind.SERVER,
            attributes={
                "inferfleet.request_id": request.request_id,
                "gen_ai.request.model": request.model,
                "inferfleet.prompt_tokens": len(request.token_ids),
            },
        )

    def _forget(self, stream: EngineStream) -> None:
        self._running.discard(stream)
        if not self._running:
            self._idle.set()


class _OpenRun:
    """A Run call that is being served. Owns its status, and closes stream and span exactly once.

    Args:
        on_close: called once, with the stream.
    """

    def __init__(
        self,
        stream: EngineStream,
        request: RoutingRequest,
        span: trace.Span,
        metrics: BalancerMetrics,
        on_close: Callable[[EngineStream], None],
    ) -> None:
        self._stream = stream
        self._request = request
        self._span = span
        self._metrics = metrics
        self._on_close = on_close
        self._status = "CANCELLED"
        """The status if the client leaves before another one is recorded."""
        self._closed = False

    def succeed(self) -> None:
        """Record that the stream ended with its Summary."""
        self._status = "OK"

    def fail(self, error: errors.FleetError) -> None:
        """Record the error that the client gets."""
        self._status = error.code.name
        self._span.set_status(trace.StatusCode.ERROR, error.message)
        self._span.set_attribute("error.type", error.code.name)
        if isinstance(error, errors.AbortedError):
            self._metrics.continuations.labels("aborted").inc()

    def close(self, _: Any = None) -> None:
        """Close the stream and count its status.

        Called at the end of the handler and at the end of the call (by gRPC); the first one counts.
        """
        if self._closed:
            return
        self._closed = True
        self._stream.close()
        self._span.end()
        request, status = self._request, self._status
        revision = self._stream.revision or request.revision
        self._metrics.requests.labels(request.model, status).inc()
        self._metrics.revision_requests.labels(request.model, revision, status).inc()
        self._on_close(self._stream)
