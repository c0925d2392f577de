"""The open requests of one engine: sends them to the core and its outputs to their streams.

`pump_reports` reads the core's reports. It never waits for a client or for another service.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable
from itertools import count

from services.common import errors
from services.engine.contract.core_client import CoreClient
from services.engine.contract.core_link import CoreDiedError
from services.engine.contract.messages import (
    AbortRequest,
    AddRequest,
    ChoiceOutput,
    RequestFailure,
    RoundReport,
)
from services.engine.front.kv_events import KvEventSink
from services.engine.front.load_report import LoadState
from services.engine.front.metrics import EngineMetrics
from services.engine.front.request_stream import RequestStream
from services.engine.front.request_times import RequestTimes
from services.engine.front.request_translation import AcceptedRequest, ModelFacts
from services.engine.text.detokenizer import TokenBytes

log = logging.getLogger(__name__)
OnReleased = Callable[[RequestStream], None]
# A full core refuses requests itself. This bounds the requests that wait for a stalled core.
_EXTRA_REQUESTS = 64
_MAX_UNRELEASED = 4096


class OpenRequests:
    """Owns the open streams; the only part of the front that reads the core's reports.

    Args:
        max_open: requests that the core runs and queues at most.
        buffer_tokens: tokens kept for a client that reads too slowly, per choice.
        on_report: called with each report after its outputs were delivered; must not block.
    """

    def __init__(
        self,
        core: CoreClient,
        facts: ModelFacts,
        tokens: TokenBytes,
        load_state: LoadState,
        metrics: EngineMetrics,
        events: KvEventSink,
        *,
        max_open: int,
        buffer_tokens: int,
        on_report: Callable[[RoundReport], None] | None = None,
    ) -> None:
        self.facts = facts
        self.load_state = load_state
        self.metrics = metrics
        self.core_failure: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """Done with the reason when the core can serve no more requests."""
        self._core = core
        self._tokens = tokens
        self._events = events
        self._max_open = max_open + _EXTRA_REQUESTS
        self._buffer_tokens = buffer_tokens
        self._on_report = on_report
        self._keys = count(1)
        self._by_key: dict[str, RequestStream] = {}
        """Requests that the core holds."""
        self._by_id: dict[tuple[str, str], RequestStream] = {}
        """Streams that a client reads, by tenant and request id."""
        self._unreleased: dict[str, tuple[RequestStream, OnReleased]] = {}
        self._core_stopping = False
        self._no_streams = asyncio.Event()
        self._no_streams.set()

    @property
    def num_streams(self) -> int:
        """Streams that a client still reads."""
        return len(self._by_id)

    @property
    def num_in_core(self) -> int:
        """Requests that were sent to the core and have not ended there."""
        return len(self._by_key)

    def open(
        self,
        request: AcceptedRequest,
        *,
        times: RequestTimes,
        deadline_unix_s: float | None = None,
        on_released: OnReleased | None = None,
    ) -> RequestStream:
        """Send a request to the core; the caller must `close` the stream in every case.

        Args:
            on_released: called once the core has freed the request's blocks.

        Raises:
            FleetError: UNAVAILABLE when draining or without a core, ALREADY_EXISTS for a request
                id that is open, RESOURCE_EXHAUSTED when too many requests are open.
        """
        self._check_admission(request)
        key = str(next(self._keys))
        stream = RequestStream(
            key, request, self.facts, self._tokens, times, buffer_tokens=self._buffer_tokens
        )
        self._by_key[key] = stream
        self._by_id[request.tenant, request.request_id] = stream
        self._no_streams.clear()
        if on_released is not None and len(self._unreleased) < _MAX_UNRELEASED:
            self._unreleased[key] = (stream, on_released)
        self.load_state.record_request()
        self._core.send([AddRequest(key, request, deadline_unix_s)])
        return stream

    def close(self, stream: RequestStream) -> None:
        """The client left or has everything: free what the core still holds; idempotent."""
        self._abort(stream)
        name = (stream.request.tenant, stream.request.request_id)
        if self._by_id.get(name) is stream:
            del self._by_id[name]
        if not self._by_id:
            self._no_streams.set()

    def abort(self, tenant: str, request_ids: Iterable[str]) -> int:
        """End requests as if their clients had left; returns how many of them were open."""
        known = [self._by_id.get((tenant, request_id)) for request_id in request_ids]
        found = [stream for stream in known if stream is not None and not stream.complete]
        for stream in found:
            stream.fail(errors.CancelledError("aborted on behalf of the client", reason="ABORTED"))
            self._abort(stream)
        return len(found)

    async def drain(self, grace_s: float) -> tuple[int, int]:
        """Refuse new requests and wait; returns how many streams finished and how many were cut."""
        await self.load_state.set_draining()
        before = self.num_streams
        try:
            async with asyncio.timeout(grace_s):
                await self._no_streams.wait()
        except TimeoutError:
            left = self.end_all()
            return max(0, before - left), left
        return before, 0

    def end_all(self) -> int:
        """End all open streams with a status; returns how many there were."""
        left = list(self._by_id.values())
        for stream in left:
            stream.interrupt("the engine is going down", "DRAINING")
            self._abort(stream)
        return len(left)

    async def wait_closed(self, timeout_s: float) -> None:
        """Wait until the clients have read their last events."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._no_streams.wait()
        except TimeoutError:
            log.warning("%d clients have not read the end of their stream", self.num_streams)

    async def pump_reports(self) -> None:
        """Handle the core's reports until the core ends; if it died, fail every stream."""
        reason = "the core ended"
        try:
            async for report in self._core:
                await self._handle_report(report)
                # Many reports in a row must not starve the streams.
                await asyncio.sleep(0)
        except CoreDiedError as error:
            reason = str(error)
        if not self._core_stopping:
            self.fail_all(reason)

    def expect_core_end(self) -> None:
        """The engine is about to stop the core: its end is not a failure."""
        self._core_stopping = True

    def fail_all(self, reason: str) -> None:
        """The core can serve no more requests: end every stream and complete `core_failure`."""
        if self.core_failure.done():
            return
        log.error("the core failed: %s", reason)
        for stream in list(self._by_key.values()):
            stream.leave_core()
            stream.interrupt(f"the engine's core died: {reason}", "CORE_DIED")
        self._by_key.clear()
        for key in list(self._unreleased):
            self._notify_released(key)
        self.core_failure.set_result(reason)

    def _check_admission(self, request: AcceptedRequest) -> None:
        if self.core_failure.done():
            raise errors.UnavailableError("the engine's core has died", reason="CORE_DIED")
        if self.load_state.draining:
            raise errors.UnavailableError(
                "the engine is draining", reason="DRAINING", retry_after_s=1.0
            )
        older = self._by_id.get((request.tenant, request.request_id))
        if older is not None:
            self._replace_attempt(older, request)
        elif len(self._by_key) >= self._max_open:
            raise errors.ResourceExhaustedError(
                f"{len(self._by_key)} requests are open at this engine",
                reason="QUEUE_FULL",
                retry_after_s=self.load_state.retry_after_s,
            )

    def _replace_attempt(self, older: RequestStream, request: AcceptedRequest) -> None:
        if request.attempt <= older.request.attempt:
            raise errors.AlreadyExistsError(
                f"request_id {request.request_id} is already open (attempt "
                f"{older.request.attempt}, this is attempt {request.attempt})",
                reason="DUPLICATE_REQUEST_ID",
                metadata={"request_id": request.request_id},
            )
        older.fail(
            errors.AbortedError(
                f"replaced by attempt {request.attempt} of the same request", reason="REPLACED"
            )
        )
        self.close(older)

    def _abort(self, stream: RequestStream) -> None:
        self._by_key.pop(stream.key, None)
        if stream.leave_core():
            self._core.send([AbortRequest(request_key=stream.key)])

    async def _handle_report(self, report: RoundReport) -> None:
        for mark in report.marks:
            unreleased = self._unreleased.get(mark.request_key)
            if unreleased is not None:
                unreleased[0].times.add_mark(mark)
        for output in report.outputs:
            self._deliver(output)
        for failure in report.failures:
            self._fail_request(failure)
        for mark in report.marks:
            if mark.verb == "release":
                self._notify_released(mark.request_key)
        self._events.add_report(report)
        if self._on_report is not None:
            self._on_report(report)
        self.metrics.count_round(report)
        await self.load_state.record_round(report.load, placement_version=report.placement_version)

    def _deliver(self, output: ChoiceOutput) -> None:
        stream = self._by_key.get(output.request_key)
        if stream is None:
            return
        self.metrics.count_tokens(stream.times, len(output.token_ids))
        stream.add_output(output)
        self._stop_in_core(stream, output)

    def _stop_in_core(self, stream: RequestStream, output: ChoiceOutput) -> None:
        """Abort in the core what has ended here: by a stop string or a client that is too slow."""
        if output.finish_reason is not None:
            stream.end_choice_in_core(output.choice)
        if stream.complete or stream.error is not None or not stream.in_core:
            self._abort(stream)
        elif stream.has_ended(output.choice) and stream.end_choice_in_core(output.choice):
            self._core.send([AbortRequest(request_key=stream.key, choice=output.choice)])

    def _fail_request(self, failure: RequestFailure) -> None:
        stream = self._by_key.pop(failure.request_key, None)
        if stream is None:
            return
        stream.leave_core()
        cls = errors.BY_NAME.get(failure.code, errors.InternalError)
        exhausted = cls is errors.ResourceExhaustedError
        field = failure.field or ""
        described = failure.message.removeprefix(f"{field}: ")
        fields = [errors.Violation(field, described)] if field else []
        stream.fail(
            cls(
                failure.message,
                reason=failure.reason or None,
                violations=fields,
                retry_after_s=failure.retry_after_s
                or (self.load_state.retry_after_s if exhausted else None),
            )
        )

    def _notify_released(self, key: str) -> None:
        stream, on_released = self._unreleased.pop(key, (None, None))
        if stream is not None and on_released is not None:
            on_released(stream)
