"""The open requests of one engine: admits them by id, feeds them from the core, ends them.

The pump that reads the core's reports never waits for a reader, a collector or another service.
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
from services.engine.front.load_report import LoadBoard
from services.engine.front.metrics import FrontMetrics
from services.engine.front.request_stream import RequestStream
from services.engine.front.request_times import RequestTimes
from services.engine.front.request_translation import AcceptedRequest, ModelFacts
from services.engine.text.detokenizer import TokenBytes

log = logging.getLogger(__name__)
Released = Callable[[RequestStream], None]
# A core without room refuses by itself; this bounds what waits for a core that has stopped.
_SLACK_REQUESTS = 64
_MAX_UNRELEASED = 4096


class Front:
    """Owner of the open streams; the only one that talks to the core."""

    def __init__(
        self,
        core: CoreClient,
        facts: ModelFacts,
        tokens: TokenBytes,
        board: LoadBoard,
        metrics: FrontMetrics,
        events: KvEventSink,
        *,
        max_open: int,
        buffer_tokens: int,
        on_report: Callable[[RoundReport], None] | None = None,
    ) -> None:
        self.facts = facts
        self.tokens = tokens
        self.board = board
        self.metrics = metrics
        self.core_failure: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._core = core
        self._events = events
        self._max_open = max_open + _SLACK_REQUESTS
        self._buffer_tokens = buffer_tokens
        self._on_report = on_report
        self._keys = count(1)
        self._by_key: dict[str, RequestStream] = {}
        self._by_id: dict[tuple[str, str], RequestStream] = {}
        self._unreleased: dict[str, tuple[RequestStream, Released]] = {}
        board.count_open = lambda: len(self._by_key)
        self._closing = False
        self._empty = asyncio.Event()
        self._empty.set()

    @property
    def num_open(self) -> int:
        """Streams whose reader has not gone."""
        return len(self._by_id)

    def open(
        self,
        request: AcceptedRequest,
        *,
        times: RequestTimes,
        deadline_unix_s: float | None = None,
        on_released: Released | None = None,
    ) -> RequestStream:
        """Hand a request to the core; the caller must `close` the stream whatever happens.

        Raises:
            FleetError: UNAVAILABLE when draining, ALREADY_EXISTS for an id in flight,
                RESOURCE_EXHAUSTED when too much waits.
        """
        self._check_room(request)
        key = str(next(self._keys))
        stream = RequestStream(
            key, request, self.facts, self.tokens, times, buffer_tokens=self._buffer_tokens
        )
        self._by_key[key] = stream
        self._by_id[request.tenant, request.request_id] = stream
        self._empty.clear()
        if on_released is not None and len(self._unreleased) < _MAX_UNRELEASED:
            self._unreleased[key] = (stream, on_released)
        self.board.work_arrived()
        self._core.send([_to_core(key, request, deadline_unix_s)])
        return stream

    def close(self, stream: RequestStream) -> None:
        """The reader is gone or served: free what the core still holds; idempotent."""
        self._abort(stream)
        name = (stream.request.tenant, stream.request.request_id)
        if self._by_id.get(name) is stream:
            del self._by_id[name]
        if not self._by_id:
            self._empty.set()

    def abort(self, tenant: str, request_ids: Iterable[str]) -> int:
        """End requests as if their clients had left; returns how many were known."""
        known = [self._by_id.get((tenant, request_id)) for request_id in request_ids]
        found = [stream for stream in known if stream is not None and not stream.complete]
        for stream in found:
            stream.fail(errors.CancelledError("aborted on behalf of the client", reason="ABORTED"))
            self._abort(stream)
        return len(found)

    async def drain(self, grace_s: float) -> tuple[int, int]:
        """Refuse new work; returns the streams that ended by themselves and those that did not."""
        await self.board.set_draining()
        before = self.num_open
        try:
            async with asyncio.timeout(grace_s):
                await self._empty.wait()
        except TimeoutError:
            left = self.cut()
            return max(0, before - left), left
        return before, 0

    def cut(self) -> int:
        """End what still runs with a status; returns how many streams that were."""
        left = list(self._by_id.values())
        for stream in left:
            stream.breaks(errors.UnavailableError, "the engine is going down", "DRAINING")
            self._abort(stream)
        return len(left)

    async def wait_closed(self, timeout_s: float) -> None:
        """Wait until the readers have got their last events."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._empty.wait()
        except TimeoutError:
            log.warning("%d streams did not take their end", self.num_open)

    async def pump(self) -> None:
        """Read the core's reports until it is stopped; on its death end every stream."""
        reason = "the core ended"
        try:
            async for report in self._core:
                await self._take(report)
                # Reports that came in a burst must not starve the readers.
                await asyncio.sleep(0)
        except CoreDiedError as error:
            reason = str(error)
        if not self._closing:
            self.core_died(reason)

    def closing(self) -> None:
        """The core is about to be stopped: its end is no failure."""
        self._closing = True

    def _check_room(self, request: AcceptedRequest) -> None:
        if self.core_failure.done():
            raise errors.UnavailableError("the engine's core has died", reason="CORE_DIED")
        if self.board.draining:
            raise errors.UnavailableError(
                "the engine is draining", reason="DRAINING", retry_after_s=1.0
            )
        older = self._by_id.get((request.tenant, request.request_id))
        if older is not None:
            self._replace(older, request)
        elif len(self._by_key) >= self._max_open:
            raise errors.ResourceExhaustedError(
                f"{len(self._by_key)} requests are open at this engine",
                reason="QUEUE_FULL",
                retry_after_s=self.board.retry_after_s,
            )

    def _replace(self, older: RequestStream, request: AcceptedRequest) -> None:
        if request.attempt <= older.request.attempt:
            raise errors.AlreadyExistsError(
                f"request_id {request.request_id} is in flight (attempt "
                f"{older.request.attempt}, this one is {request.attempt})",
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
        if stream.in_core:
            stream.in_core.clear()
            self._core.send([AbortRequest(request_key=stream.key)])

    async def _take(self, report: RoundReport) -> None:
        for mark in report.marks:
            unreleased = self._unreleased.get(mark.request_key)
            if unreleased is not None:
                unreleased[0].times.add(mark)
        for output in report.outputs:
            stream = self._by_key.get(output.request_key)
            if stream is None:
                continue
            self.metrics.tokens(stream.times, len(output.token_ids))
            stream.add(output)
            self._settle(stream, output)
        for failure in report.failures:
            self._fail(failure)
        for mark in report.marks:
            if mark.verb == "release":
                self._released(mark.request_key)
        self._events.add(report)
        if self._on_report is not None:
            self._on_report(report)
        self.metrics.round(report)
        await self.board.update(
            report.load, num_open=len(self._by_key), placement_version=report.placement_version
        )

    def _settle(self, stream: RequestStream, output: ChoiceOutput) -> None:
        """End in the core what has its end here: a stop string was found, a reader is too slow."""
        if output.finish_reason is not None:
            stream.in_core.discard(output.choice)
        if stream.complete or stream.error is not None or not stream.in_core:
            self._abort(stream)
        elif output.choice in stream.in_core and stream.has_ended(output.choice):
            stream.in_core.discard(output.choice)
            self._core.send([AbortRequest(request_key=stream.key, choice=output.choice)])

    def _fail(self, failure: RequestFailure) -> None:
        stream = self._by_key.pop(failure.request_key, None)
        if stream is None:
            return
        stream.in_core.clear()
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
                or (self.board.retry_after_s if exhausted else None),
            )
        )

    def _released(self, key: str) -> None:
        stream, on_released = self._unreleased.pop(key, (None, None))
        if stream is not None and on_released is not None:
            on_released(stream)

    def core_died(self, reason: str) -> None:
        """Nothing will come any more: end every stream and make `core_failure` known."""
        log.error("the core died: %s", reason)
        for stream in list(self._by_key.values()):
            stream.in_core.clear()
            stream.breaks(errors.UnavailableError, f"the engine's core died: {reason}", "CORE_DIED")
        self._by_key.clear()
        for key in list(self._unreleased):
            self._released(key)
        if not self.core_failure.done():
            self.core_failure.set_result(reason)


def _to_core(key: str, request: AcceptedRequest, deadline_unix_s: float | None) -> AddRequest:
    return AddRequest(
        request_key=key,
        prompt_token_ids=request.prompt_token_ids,
        params=request.params,
        salt=request.salt,
        tenant=request.tenant,
        priority=request.priority,
        deadline_unix_s=deadline_unix_s,
        continued=[list(token_ids) for token_ids in request.continued],
        finished_choices=list(request.finished_choices),
    )
