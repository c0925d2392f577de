"""The internal Engine service: proto in, proto out; what happens in between is the front's."""

import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterable
from contextlib import aclosing
from typing import Any

import grpc
from opentelemetry import trace
from opentelemetry.context import Context

from inferfleet_proto.internal.v1 import engine_pb2, engine_pb2_grpc
from inferfleet_proto.v1 import inference_pb2
from services.common import errors, rpc
from services.common.rpc.carrier import RunMany, drained
from services.common.service import telemetry
from services.common.text import TextAssets
from services.engine.front.open_requests import Front
from services.engine.front.request_stream import Events, RequestStream
from services.engine.front.request_times import RequestTimes
from services.engine.front.request_translation import AcceptedRequest, translate
from services.engine.front.spans import FrontSpans

log = logging.getLogger(__name__)
ServerContext = grpc.aio.ServicerContext[engine_pb2.EngineRequest, inference_pb2.GenerateResponse]


class RunCall:
    """Runs one request to its end for whichever service it came in by: the stream, its span, its
    place in the metrics, and its end in the core whatever happens to the caller."""

    def __init__(self, front: Front, spans: FrontSpans) -> None:
        self._front = front
        self._spans = spans

    async def events(
        self,
        message: engine_pb2.EngineRequest,
        *,
        parent: Context,
        remaining_s: float | None,
    ) -> AsyncGenerator[Events, None]:
        """The request's events in groups, as they are ready.

        Raises:
            FleetError: what the request ended with.
        """
        times = RequestTimes()
        telemetry.request_id_var.set(message.request.request_id)
        request = self._checked(message, times)
        telemetry.request_id_var.set(request.request_id)
        span = self._spans.start_run(parent, request, times.received_ns)
        stream: RequestStream | None = None
        failure: BaseException | None = None
        try:
            with trace.use_span(span, end_on_exit=False, record_exception=False):
                stream = self._open(request, times, remaining_s, span)
            while events := await stream.take():
                yield events
        except BaseException as error:  # a reader that leaves is CancelledError or GeneratorExit
            failure = error
            raise
        finally:
            self._end(stream, times, failure, span)

    def _checked(self, message: engine_pb2.EngineRequest, times: RequestTimes) -> AcceptedRequest:
        try:
            return translate(message, self._front.facts)
        except errors.FleetError as error:
            self._count(error, None, times)
            raise

    def _open(
        self,
        request: AcceptedRequest,
        times: RequestTimes,
        remaining_s: float | None,
        span: trace.Span,
    ) -> RequestStream:
        return self._front.open(
            request,
            times=times,
            deadline_unix_s=None if remaining_s is None else time.time() + remaining_s,
            on_released=lambda stream: self._spans.verbs(span, stream),
        )

    def _end(
        self,
        stream: RequestStream | None,
        times: RequestTimes,
        failure: BaseException | None,
        span: trace.Span,
    ) -> None:
        if stream is not None:
            self._front.close(stream)
            if stream.complete:
                failure = None  # the reader left after it had everything
        with trace.use_span(span):
            log.debug("ended: %s", "OK" if failure is None else failure or type(failure).__name__)
        self._spans.end_run(span, stream, failure)
        self._count(failure, stream, times)

    def _count(
        self, failure: BaseException | None, stream: RequestStream | None, times: RequestTimes
    ) -> None:
        if failure is None:
            code = "OK"
        else:
            code = failure.code.name if isinstance(failure, errors.FleetError) else "CANCELLED"
        seconds = max(0, time.time_ns() - times.received_ns) / 1e9
        self._front.metrics.ended(code, stream, seconds)


class EngineServicer(engine_pb2_grpc.EngineServicer):
    """inferfleet.internal.v1.Engine."""

    def __init__(
        self, front: Front, run: RunCall, info: engine_pb2.EngineInfo, assets: TextAssets
    ) -> None:
        self._front = front
        self._run = run
        self._info = info
        self._assets = assets
        self._many = RunMany(
            self.Run,
            parse=engine_pb2.EngineRequest.FromString,
            serialise=inference_pb2.GenerateResponse.SerializeToString,
        )

    async def RunMany(self, request_iterator: AsyncIterator[Any], context: Any) -> None:
        """Run, many times in one call."""
        await self._many(request_iterator, context)

    async def close(self, patience_s: float) -> None:
        """End the calls that hold many, once what they hold has ended and been told."""
        await self._many.close(patience_s)

    async def Run(
        self, request: engine_pb2.EngineRequest, context: ServerContext
    ) -> AsyncGenerator[inference_pb2.GenerateResponse, None]:
        """Generate for the fleet."""
        metadata = context.invocation_metadata()
        _take_request_id(request.request, metadata)
        parent = telemetry.extract(metadata)
        await send_identity(context, self._info.engine_id, request.request.request_id)
        groups = self._run.events(request, parent=parent, remaining_s=rpc.remaining_s(context))
        async with aclosing(groups) as events_stream:
            async for events in events_stream:
                for event in events:
                    yield event
                await drained(context)

    async def GetInfo(
        self, request: engine_pb2.GetInfoRequest, context: object
    ) -> engine_pb2.EngineInfo:
        """What this engine is."""
        info = engine_pb2.EngineInfo()
        info.CopyFrom(self._info)
        info.draining = self._front.board.draining
        info.placement_version = self._front.board.placement_version
        return info

    async def GetTokenizer(
        self, request: engine_pb2.GetTokenizerRequest, context: object
    ) -> AsyncGenerator[engine_pb2.TokenizerChunk, None]:
        """Tokenizer and template, in parts."""
        if request.digest and request.digest != self._assets.digest:
            raise errors.NotFoundError(
                f"this engine's tokenizer is {self._assets.digest}", reason="TOKENIZER_NOT_FOUND"
            )
        for chunk in self._assets.chunks():
            yield chunk

    async def WatchLoad(
        self, request: engine_pb2.WatchLoadRequest, context: object
    ) -> AsyncGenerator[engine_pb2.LoadReport, None]:
        """The load, until the watcher leaves."""
        async with aclosing(self._front.board.watch()) as report_stream:
            async for report in report_stream:
                yield report

    async def Drain(
        self, request: engine_pb2.DrainRequest, context: object
    ) -> engine_pb2.DrainResponse:
        """Refuse new work; the process goes on until it is told to end."""
        ended, aborted = await self._front.drain(request.grace_s)
        return engine_pb2.DrainResponse(streams_ended=ended, streams_aborted=aborted)

    async def Abort(
        self, request: engine_pb2.AbortRequest, context: object
    ) -> engine_pb2.AbortResponse:
        """End requests as if their clients had left."""
        return engine_pb2.AbortResponse(
            aborted=self._front.abort(request.tenant, request.request_ids)
        )


def _take_request_id(
    request: inference_pb2.GenerateRequest, metadata: Iterable[tuple[str, Any]] | None
) -> None:
    """A request without an id has the one of its call, if that has one."""
    if not request.request_id:
        given = dict(metadata or ()).get(rpc.REQUEST_ID_KEY, "")
        request.request_id = given if isinstance(given, str) else ""


async def send_identity(context: ServerContext, engine_id: str, request_id: str) -> None:
    """Initial metadata: who answers, and to which request (if the id can travel as a header)."""
    pairs = [(rpc.ENGINE_ID_KEY, engine_id)]
    if request_id.isascii() and request_id.isprintable() and 0 < len(request_id) <= 128:
        pairs.append((rpc.REQUEST_ID_KEY, request_id))
    await context.send_initial_metadata(tuple(pairs))
