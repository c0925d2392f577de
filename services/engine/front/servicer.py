"""The internal gRPC service Engine: runs requests, reports the load, drains and aborts."""

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
from services.common.rpc.carrier import RunContext, RunMany, wait_sent
from services.common.service import telemetry
from services.common.text import TextAssets
from services.engine.front.open_requests import OpenRequests
from services.engine.front.request_stream import Events, RequestStream
from services.engine.front.request_times import RequestTimes
from services.engine.front.request_translation import AcceptedRequest, translate
from services.engine.front.spans import RequestSpans

log = logging.getLogger(__name__)
ServerContext = grpc.aio.ServicerContext[engine_pb2.EngineRequest, inference_pb2.GenerateResponse]


class RequestRunner:
    """Runs a request to its end, for the internal and for the public service.

    It opens the stream, records span and metrics, and ends the request in the core if the caller
    leaves.
    """

    def __init__(self, requests: OpenRequests, spans: RequestSpans) -> None:
        self._requests = requests
        self._spans = spans

    async def events(
        self,
        message: engine_pb2.EngineRequest,
        *,
        parent: Context,
        remaining_s: float | None,
    ) -> AsyncGenerator[Events, None]:
        """Yield the request's events, in groups as they become ready.

        Args:
            parent: trace context of the caller.
            remaining_s: time until the caller's deadline; None for no deadline.

        Raises:
            FleetError: the request ended with this status.
        """
        times = RequestTimes()
        telemetry.request_id_var.set(message.request.request_id)
        request = self._check(message, times)
        telemetry.request_id_var.set(request.request_id)
        span = self._spans.start_run(parent, request, times.received_ns)
        stream: RequestStream | None = None
        failure: BaseException | None = None
        try:
            with trace.use_span(span, end_on_exit=False, record_exception=False):
                stream = self._open(request, times, remaining_s, span)
            while events := await stream.next_events():
                yield events
        except BaseException as error:  # CancelledError or GeneratorExit if the client leaves
            failure = error
            raise
        finally:
            self._end(stream, times, failure, span)

    def _check(self, message: engine_pb2.EngineRequest, times: RequestTimes) -> AcceptedRequest:
        try:
            return translate(message, self._requests.facts)
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
        return self._requests.open(
            request,
            times=times,
            deadline_unix_s=None if remaining_s is None else time.time() + remaining_s,
            on_released=lambda stream: self._spans.add_steps(span, stream),
        )

    def _end(
        self,
        stream: RequestStream | None,
        times: RequestTimes,
        failure: BaseException | None,
        span: trace.Span,
    ) -> None:
        if stream is not None:
            self._requests.close(stream)
            if stream.complete:
                failure = None  # the client left after the last event
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
        self._requests.metrics.count_request(code, stream, seconds)


class EngineServicer(engine_pb2_grpc.EngineServicer):
    """inferfleet.internal.v1.Engine."""

    def __init__(
        self,
        requests: OpenRequests,
        runner: RequestRunner,
        info: engine_pb2.EngineInfo,
        assets: TextAssets,
    ) -> None:
        self._requests = requests
        self._runner = runner
        self._info = info
        self._assets = assets
        self._many = RunMany(
            self.Run,
            parse=engine_pb2.EngineRequest.FromString,
            serialise=inference_pb2.GenerateResponse.SerializeToString,
        )

    async def RunMany(self, request_iterator: AsyncIterator[Any], context: Any) -> None:
        """Many calls of Run over one gRPC call."""
        await self._many(request_iterator, context)

    async def close(self, timeout_s: float) -> None:
        """End the RunMany calls once their requests have ended and sent their last events."""
        await self._many.close(timeout_s)

    async def Run(
        self, request: engine_pb2.EngineRequest, context: RunContext
    ) -> AsyncGenerator[inference_pb2.GenerateResponse, None]:
        """Generate tokens for one request of the fleet."""
        metadata = context.invocation_metadata()
        _fill_request_id(request.request, metadata)
        parent = telemetry.extract(metadata)
        await send_identity(context, self._info.engine_id, request.request.request_id)
        groups = self._runner.events(request, parent=parent, remaining_s=rpc.remaining_s(context))
        async with aclosing(groups) as events_stream:
            async for events in events_stream:
                for event in events:
                    yield event
                await wait_sent(context)

    async def GetInfo(
        self, request: engine_pb2.GetInfoRequest, context: object
    ) -> engine_pb2.EngineInfo:
        """The engine's model, shape and state."""
        info = engine_pb2.EngineInfo()
        info.CopyFrom(self._info)
        info.draining = self._requests.load_state.draining
        info.placement_version = self._requests.load_state.placement_version
        return info

    async def GetTokenizer(
        self, request: engine_pb2.GetTokenizerRequest, context: object
    ) -> AsyncGenerator[engine_pb2.TokenizerChunk, None]:
        """The tokenizer and chat template, in chunks."""
        if request.digest and request.digest != self._assets.digest:
            raise errors.NotFoundError(
                f"this engine has the tokenizer {self._assets.digest}, not {request.digest}",
                reason="TOKENIZER_NOT_FOUND",
            )
        for chunk in self._assets.chunks():
            yield chunk

    async def WatchLoad(
        self, request: engine_pb2.WatchLoadRequest, context: object
    ) -> AsyncGenerator[engine_pb2.LoadReport, None]:
        """The load at each change, until the caller leaves."""
        async with aclosing(self._requests.load_state.watch()) as report_stream:
            async for report in report_stream:
                yield report

    async def Drain(
        self, request: engine_pb2.DrainRequest, context: object
    ) -> engine_pb2.DrainResponse:
        """Refuse new requests; the process runs on until it gets a signal."""
        ended, aborted = await self._requests.drain(request.grace_s)
        return engine_pb2.DrainResponse(streams_ended=ended, streams_aborted=aborted)

    async def Abort(
        self, request: engine_pb2.AbortRequest, context: object
    ) -> engine_pb2.AbortResponse:
        """End requests as if their clients had left."""
        return engine_pb2.AbortResponse(
            aborted=self._requests.abort(request.tenant, request.request_ids)
        )


def _fill_request_id(
    request: inference_pb2.GenerateRequest, metadata: Iterable[tuple[str, Any]] | None
) -> None:
    """Give a request without an id the id in its call's metadata, if there is one."""
    if not request.request_id:
        given = dict(metadata or ()).get(rpc.REQUEST_ID_KEY, "")
        request.request_id = given if isinstance(given, str) else ""


async def send_identity(context: RunContext, engine_id: str, request_id: str) -> None:
    """Send the engine id and, if it is valid as a header, the request id as initial metadata."""
    pairs = [(rpc.ENGINE_ID_KEY, engine_id)]
    if request_id.isascii() and request_id.isprintable() and 0 < len(request_id) <= 128:
        pairs.append((rpc.REQUEST_ID_KEY, request_id))
    await context.send_initial_metadata(tuple(pairs))
