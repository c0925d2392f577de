"""Admits a request when an engine of its model has free slots, and queues it otherwise.

`Admission` owns the queues. A caller that gets a `SlotReservation` must `use` or `close` it.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf

from services.balancer.engines.engine_view import EngineState, EngineView, RoutingRequest
from services.balancer.queue.fair_queue import FairQueue
from services.balancer.queue.slots import QueueKey, ReservedSlots, SlotReservation, queue_key
from services.balancer.queue.tenant_counters import TenantCounters
from services.balancer.queue.wait_estimate import WaitEstimate
from services.common.errors import (
    DeadlineExceededError,
    FleetError,
    ResourceExhaustedError,
    UnavailableError,
)
from services.common.retry_after import retry_after_s

_MIN_RETRY_S = 0.5
_MIN_RECHECK_S = 0.1


@dataclass(eq=False)
class _Waiting:
    """A queued request; `admitted` is resolved when it leaves the queue."""

    request: RoutingRequest
    deadline: float | None
    allowed_s: float
    """Seconds until the deadline when the request arrived."""
    admitted: "asyncio.Future[None]" = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )


class Admission:
    """Owns the queues, one per model and required revision.

    Args:
        views: frozen views of a model's engines, as of now.
        queue_size: requests that may wait in one queue.
        headroom: slots of an engine beyond max_num_seqs.
        patience_s: seconds that a request waits while no engine of its queue is healthy.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        views: Callable[[str], Sequence[EngineView]],
        *,
        queue_size: int,
        headroom: int,
        patience_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.counters = TenantCounters()
        self._views = views
        self._queue_size = queue_size
        self._headroom = headroom
        self._patience_s = patience_s
        self._clock = clock
        self._queues: dict[QueueKey, FairQueue[_Waiting]] = {}
        self._reserved = ReservedSlots()
        self._estimate = WaitEstimate(clock)

    @property
    def reserved_slots(self) -> int:
        """Slots of requests that are admitted and not yet dispatched."""
        return self._reserved.total

    def queued(self) -> dict[str, int]:
        """Waiting requests by model."""
        lengths: dict[str, int] = {}
        for (model, _), queue in list(self._queues.items()):
            lengths[model] = lengths.get(model, 0) + len(queue)
        return lengths

    def has_free_slots(self, engine: EngineView, slots: int = 1) -> bool:
        """Whether the engine has that many free slots.

        A request that needs more slots than the engine has fits if all of them are free.
        """
        total = engine.max_num_seqs + self._headroom
        serving = engine.state is EngineState.SERVING
        return serving and engine.occupancy + min(slots, total) <= total

    async def enter(self, request: RoutingRequest, timeout_s: float | None) -> SlotReservation:
        """Wait for the request's slots.

        Args:
            timeout_s: seconds to the request's deadline; None if it has none.

        Raises:
            DeadlineExceededError: the deadline passed, or the rest no longer suffices for an
                answer; the request was not dispatched.
            ResourceExhaustedError: the queue is full, a request with a fairer claim displaced this
                one, or the estimated wait exceeds the deadline.
            UnavailableError: no engine of the model was healthy for `patience_s`.
        """
        deadline = None if timeout_s is None else self._clock() + timeout_s
        if timeout_s is not None and timeout_s <= 0:
            raise _deadline_error()
        self.counters.enter(request.tenant)
        try:
            await self._wait_for_slots(request, deadline)
        except BaseException:
            self.counters.leave(request.tenant)
            self.pump()
            raise
        return SlotReservation(
            request,
            self._reserved,
            self.counters,
            self._estimate,
            clock=self._clock,
            on_close=self.pump,
        )

    def pump(self) -> None:
        """Admit waiting requests; call it whenever slots may have become free."""
        for key, queue in list(self._queues.items()):
            if not queue:
                del self._queues[key]
                continue
            now = self._clock()
            # The first request waits for all of its slots; no later one overtakes it.
            while (waiting := queue.peek()) is not None:
                expired = waiting.deadline is not None and now >= self._last_start(waiting)
                if not expired and not self._fits(waiting.request):
                    break
                queue.remove(waiting)
                if expired:
                    waiting.admitted.set_exception(_deadline_error())
                else:
                    self._reserved.reserve(waiting.request)
                    waiting.admitted.set_result(None)

    def retry_after_s(self, request: RoutingRequest) -> float:
        """Seconds until a slot is likely to be free, from the measured drain rate of the model."""
        waiting = len(self._queues.get(queue_key(request), ())) + 1
        ended_per_s = self._estimate.ended_per_s(request.model)
        return retry_after_s(waiting, ended_per_s, at_least_s=_MIN_RETRY_S)

    async def _wait_for_slots(self, request: RoutingRequest, deadline: float | None) -> None:
        key = queue_key(request)
        queue = self._queues.get(key)
        if not queue and self._fits(request):
            self._reserved.reserve(request)
            return
        if queue is None:
            queue = self._queues[key] = FairQueue(self._queue_size, self.counters)
        waiting = self._enqueue(queue, request, deadline)
        try:
            await self._wait_until_admitted(waiting)
        except BaseException:
            if waiting.admitted.done() and waiting.admitted.exception() is None:
                self._reserved.release(request)  # admitted at the moment of giving up
            queue.remove(waiting)
            raise

    def _enqueue(
        self, queue: FairQueue[_Waiting], request: RoutingRequest, deadline: float | None
    ) -> _Waiting:
        allowed_s = inf if deadline is None else deadline - self._clock()
        answer_in_s = self._estimate.answer_in_s(
            request,
            ahead=queue.ahead_of(request.tenant),
            slots=self._serving_slots(request),
            allowed_s=allowed_s,
        )
        if allowed_s < answer_in_s:
            raise self._queue_error(
                request,
                f"model {request.model}: the estimated time to the answer, {answer_in_s:.1f} s, "
                f"exceeds the deadline of {allowed_s:.1f} s",
            )
        waiting = _Waiting(request, deadline, allowed_s)
        offer = queue.offer(waiting, request.tenant, request.priority)
        if offer.displaced is not None:
            offer.displaced.admitted.set_exception(self._full_error(offer.displaced.request))
        if not offer.accepted:
            raise self._full_error(request)
        return waiting

    async def _wait_until_admitted(self, waiting: _Waiting) -> None:
        request, deadline, unhealthy_since = waiting.request, waiting.deadline, None
        while not waiting.admitted.done():
            now = self._clock()
            if deadline is not None and now >= deadline:
                raise _deadline_error()
            waits = [max(self._patience_s, _MIN_RECHECK_S)]  # health may change meanwhile
            if deadline is not None:
                waits.append(deadline - now)
            if any(e.state is EngineState.SERVING for e in self._engines(request)):
                unhealthy_since = None
            else:
                unhealthy_since = now if unhealthy_since is None else unhealthy_since
                patience_left_s = self._patience_s - (now - unhealthy_since)
                if patience_left_s <= 0:
                    raise no_engine_error(request.model, self.retry_after_s(request))
                waits.append(patience_left_s)
            await asyncio.wait({waiting.admitted}, timeout=min(waits))
        waiting.admitted.result()
        if deadline is not None and self._clock() >= deadline:
            raise _deadline_error()  # admitted in time, but this task resumed too late

    def _engines(self, request: RoutingRequest) -> list[EngineView]:
        views = self._views(request.model)
        return [engine for engine in views if request.revision in ("", engine.revision)]

    def _fits(self, request: RoutingRequest) -> bool:
        """Whether one engine has the request's slots free, and the queue's engines together have
        them beside those already promised."""
        free, widest = 0, 0
        for engine in self._engines(request):
            if self.has_free_slots(engine, request.num_choices):
                widest = max(widest, engine.max_num_seqs + self._headroom)
            if engine.state is EngineState.SERVING:
                free += max(engine.max_num_seqs + self._headroom - engine.occupancy, 0)
        unpromised = free - self._reserved.promised(request)
        return widest > 0 and unpromised >= min(request.num_choices, widest)

    def _serving_slots(self, request: RoutingRequest) -> int:
        """Slots, free or not, of the healthy engines that may serve the request."""
        return sum(
            engine.max_num_seqs + self._headroom
            for engine in self._engines(request)
            if engine.state is EngineState.SERVING
        )

    def _last_start(self, waiting: _Waiting) -> float:
        """The latest time at which starting the request still makes sense: later, its answer would
        miss the deadline and its slot would be wasted."""
        assert waiting.deadline is not None
        return waiting.deadline - self._estimate.needed_s(waiting.request, waiting.allowed_s)

    def _full_error(self, request: RoutingRequest) -> FleetError:
        return self._queue_error(request, f"the queue of model {request.model} is full")

    def _queue_error(self, request: RoutingRequest, problem: str) -> FleetError:
        retry_s = self.retry_after_s(request)
        return ResourceExhaustedError(
            f"{problem}; try again in {retry_s:.1f} s", reason="QUEUE_FULL", retry_after_s=retry_s
        )


def no_engine_error(model: str, retry_after_s: float) -> UnavailableError:
    """The error for a model whose engines are all unable to take work now."""
    return UnavailableError(
        f"no engine of model {model} can take the request now",
        reason="NO_ENGINE",
        metadata={"model": model[:128]},
        retry_after_s=retry_after_s,
    )


def _deadline_error() -> DeadlineExceededError:
    return DeadlineExceededError("the deadline passed before an engine had a free slot")
