"""Engine/Run and RunMany as the balancer serves them: bytes in, bytes out, one `route` span around
each stream."""

import asyncio
import contextlib
from typing import Any

import grpc
from opentelemetry import trace

from inferfleet_proto.internal.v1 import engine_pb2
from services.balancer.request.exchange import Exchange, Rooms
from services.balancer.request.incoming import Incoming, asked_of, parse
from services.common import errors
from services.common.rpc import REQUEST_ID_KEY
from services.common.rpc.carrier import RunMany
from services.common.service import telemetry

SERVICE_NAME = "inferfleet.internal.v1.Engine"


class RunServicer:
    """Serves Run, alone and many in one call, and nothing else of the Engine service.

    Args:
        rooms: what an exchange works with.
        tracer: of this service.
    """

    def __init__(self, rooms: Rooms, tracer: trace.Tracer) -> None:
        self._rooms = rooms
        self._tracer = tracer
        self._draining = False
        self._running: set[Exchange] = set()
        self._many = RunMany(self.Run, parse=parse)
        self._idle = asyncio.Event()
        self._idle.set()

    def handler(self) -> Any:
        """For `server.add_generic_rpc_handlers`: responses are bytes already."""
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

    async def cut(self, patience_s: float) -> None:
        """End the streams that still run with a status, and wait a little until callers have it."""
        self._draining = True
        for exchange in list(self._running):
            exchange.cut()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), patience_s)
        await self._many.close(patience_s)

    async def Run(self, incoming: Incoming, context: "grpc.aio.ServicerContext[Any, Any]") -> None:
        """Route one request and stream the answer of whichever engines produce it."""
        if self._draining:
            raise errors.UnavailableError(
                "the balancer is draining", reason="DRAINING", retry_after_s=1.0
            )
        asked = asked_of(incoming.request)
        span = self._tracer.start_span(
            "route",
            context=telemetry.extract(context.invocation_metadata()),
            kind=trace.SpanKind.SERVER,
            attributes={
                "inferfleet.request_id": asked.request_id,
                "gen_ai.request.model": asked.model,
                "inferfleet.prompt_tokens": len(asked.token_ids),
            },
        )
        telemetry.request_id_var.set(asked.request_id)
        exchange = Exchange(self._rooms, incoming, asked, context, span)
        status = "CANCELLED"
        self._running.add(exchange)
        self._idle.clear()
        closed = False

        def close(_: Any = None) -> None:
            """At the end of the generator or of the call, whichever comes first."""
            nonlocal closed
            if closed:
                return
            closed = True
            exchange.close()
            span.end()
            stats = self._rooms.stats
            stats.requests.labels(asked.model, status).inc()
            revision = exchange.revision or asked.revision
            stats.revision_requests.labels(asked.model, revision, status).inc()
            self._running.discard(exchange)
            if not self._running:
                self._idle.set()

        hook: Any = close
        context.add_done_callback(hook)
        try:
            await exchange.run(context.write)
            status = "OK"
        except errors.FleetError as error:
            status = error.code.name
            _mark_failed(span, error)
            if isinstance(error, errors.AbortedError):
                self._rooms.stats.continuations.labels("aborted").inc()
            if not exchange.greeted:
                await context.send_initial_metadata(((REQUEST_ID_KEY, asked.request_id),))
            raise
        finally:
            close()


def _mark_failed(span: trace.Span, error: errors.FleetError) -> None:
    span.set_status(trace.StatusCode.ERROR, error.message)
    span.set_attribute("error.type", error.code.name)
