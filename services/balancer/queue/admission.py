"""The door: a request passes when an engine of its model has room, and waits in the queue if not.

Owns the queues and the places granted but not yet dispatched. Whoever gets a `Grant` must `use` or
`leave` it; `leave` is idempotent and right in every exit path.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf

from services.balancer.engines.engine_view import Asked, EngineState, EngineView
from services.balancer.queue.drain_rate import DrainRate, ServiceTime
from services.balancer.queue.fair_queue import FairQueue, TenantCounters
from services.common.errors import (
    DeadlineExceededError,
    FleetError,
    ResourceExhaustedError,
    UnavailableError,
)

_RETRY_S = (0.5, 60.0)
# Of the likely service time: with less than this left, an answer in time is not likely.
_HOPELESS = 0.8
# Of the time that a request came with: while it has that much left, its chance is as good as ever.
_HARDLY_WAITED = 0.9


Lane = tuple[str, str]
"""Model, and revision if the request wants a certain one. Each lane has its own queue."""


@dataclass(eq=False)
class Grant:
    """A right to dispatch one request, and the tenant's account while it runs."""

    admission: "Admission"
    asked: Asked
    reserved: bool = True
    left: bool = False
    answered: bool = False
    used_at: float = 0.0

    def use(self) -> None:
        """The request was dispatched: from here on the engine's own count stands for it."""
        if self.reserved:
            self.reserved = False
            self.used_at = self.admission.clock()
            self.admission.release(self.asked)

    def served(self) -> None:
        """It was answered to its end: how long that took counts for what others may expect."""
        self.answered = True
        self.admission.served(self.asked, self.admission.clock() - self.used_at)

    def charge(self, weighted_tokens: float) -> None:
        """Tokens were served to the tenant."""
        self.admission.counters.charge(self.asked.tenant, weighted_tokens)

    def leave(self) -> None:
        """The request has ended."""
        if not self.left:
            self.left = True
            self.use()
            if not self.answered:
                self.admission.lasted(self.asked, self.admission.clock() - self.used_at)
            self.admission.left(self.asked)


@dataclass(eq=False)
class _Entry:
    asked: Asked
    deadline: float | None
    allowed_s: float
    """What it had until its deadline when it came."""
    granted: "asyncio.Future[None]" = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )


class Admission:
    """Owns the queues of all lanes.

    Args:
        views: frozen views of a model's engines now.
        queue_size: places per lane.
        headroom: sequences an engine is given beyond max_num_seqs.
        patience_s: how long to wait while no engine of the lane is healthy.
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
        self.clock = clock
        self._queues: dict[Lane, FairQueue[_Entry]] = {}
        self._reserved: dict[Lane, int] = {}
        self._rates: dict[str, DrainRate] = {}
        self._times: dict[str, ServiceTime] = {}

    def queued(self) -> dict[str, int]:
        """Requests waiting, by model."""
        lengths: dict[str, int] = {}
        for (model, _), queue in list(self._queues.items()):
            lengths[model] = lengths.get(model, 0) + len(queue)
        return lengths

    def has_room(self, engine: EngineView, seats: int = 1) -> bool:
        """Whether a new request of so many sequences may go to this engine.

        One that is wider than the engine needs the whole of it.
        """
        places = engine.max_num_seqs + self._headroom
        serving = engine.state is EngineState.SERVING
        return serving and engine.occupancy + min(seats, places) <= places

    async def enter(self, asked: Asked, timeout_s: float | None) -> Grant:
        """Wait for a place.

        Args:
            timeout_s: seconds to the request's deadline, or None.

        Raises:
            DeadlineExceededError: it passed while waiting; nothing was dispatched.
            ResourceExhaustedError: the queue is full, a fairer claim took the place, or the wait
                would outlast the deadline.
            UnavailableError: no engine of the model was healthy for `patience_s`.
        """
        deadline = None if timeout_s is None else self.clock() + timeout_s
        if timeout_s is not None and timeout_s <= 0:
            raise _expired()
        self.counters.enter(asked.tenant)
        try:
            await self._wait(asked, deadline)
        except BaseException:
            self.counters.leave(asked.tenant)
            self.pump()
            raise
        return Grant(self, asked)

    def pump(self) -> None:
        """Hand free places to those who wait; call when room may have appeared."""
        for lane, queue in list(self._queues.items()):
            if not queue:
                del self._queues[lane]
                continue
            now = self.clock()
            # The next one waits for as many places as it needs: nobody overtakes it meanwhile.
            while (entry := queue.peek()) is not None:
                expired = entry.deadline is not None and now >= self._last_start(entry)
                if not expired and not self._fits(entry.asked):
                    break
                queue.remove(entry)
                if expired:
                    entry.granted.set_exception(_expired())
                else:
                    self._reserve(entry.asked)
                    entry.granted.set_result(None)

    def release(self, asked: Asked) -> None:
        """For `Grant` only."""
        lane = _lane_of(asked)
        self._reserved[lane] -= asked.num_choices
        if not self._reserved[lane]:
            del self._reserved[lane]

    def served(self, asked: Asked, seconds: float) -> None:
        """For `Grant` only."""
        self._times.setdefault(asked.model, ServiceTime()).served(seconds, asked.expected_output)

    def lasted(self, asked: Asked, seconds: float) -> None:
        """For `Grant` only."""
        self._times.setdefault(asked.model, ServiceTime()).lasted(seconds, asked.expected_output)

    def left(self, asked: Asked) -> None:
        """For `Grant` only."""
        self.counters.leave(asked.tenant)
        if asked.model not in self._rates:
            self._rates[asked.model] = DrainRate(self.clock)
        self._rates[asked.model].ended()
        self.pump()

    def retry_after_s(self, asked: Asked) -> float:
        """When a place is likely, from the measured rate at which the model's requests end."""
        waiting = len(self._queues.get(_lane_of(asked), ())) + 1
        rate = self._rates[asked.model].per_s() if asked.model in self._rates else 0.0
        guess = waiting / rate if rate > 0 else 1.0
        return min(max(guess, _RETRY_S[0]), _RETRY_S[1])

    async def _wait(self, asked: Asked, deadline: float | None) -> None:
        lane = _lane_of(asked)
        queue = self._queues.get(lane)
        if not queue and self._fits(asked):
            self._reserve(asked)
            return
        if queue is None:
            queue = self._queues[lane] = FairQueue(self._queue_size, self.counters)
        allowed_s = inf if deadline is None else deadline - self.clock()
        if allowed_s < self._likely_wait_s(asked, queue, allowed_s):
            raise self._refused(asked, f"the queue of model {asked.model} outlasts the deadline")
        entry = _Entry(asked, deadline, allowed_s)
        offer = queue.offer(entry, asked.tenant, asked.priority)
        if offer.displaced is not None:
            offer.displaced.granted.set_exception(self._full(offer.displaced.asked))
        if not offer.accepted:
            raise self._full(asked)
        try:
            await self._until_granted(entry)
        except BaseException:
            if entry.granted.done() and entry.granted.exception() is None:
                self.release(asked)  # granted in the very moment of giving up
            queue.remove(entry)
            raise

    async def _until_granted(self, entry: _Entry) -> None:
        deadline, sick_since = entry.deadline, None
        while not entry.granted.done():
            now = self.clock()
            if deadline is not None and now >= deadline:
                raise _expired()
            waits = [] if deadline is None else [deadline - now]
            healthy = any(e.state is EngineState.SERVING for e in self._engines(entry.asked))
            sick_since = None if healthy else (now if sick_since is None else sick_since)
            if sick_since is not None:
                if now - sick_since >= self._patience_s:
                    raise no_engine(entry.asked.model, self.retry_after_s(entry.asked))
                waits.append(self._patience_s - (now - sick_since))
            # Health may change while waiting: look again now and then.
            await asyncio.wait({entry.granted}, timeout=min([*waits, max(self._patience_s, 0.1)]))
        entry.granted.result()
        if deadline is not None and self.clock() >= deadline:
            raise _expired()  # granted in time, but looked at too late

    def _engines(self, asked: Asked) -> list[EngineView]:
        views = self._views(asked.model)
        return [engine for engine in views if asked.revision in ("", engine.revision)]

    def _fits(self, asked: Asked) -> bool:
        """Whether an engine has the places, and the lane has them beside those already promised."""
        free, widest = 0, 0
        for engine in self._engines(asked):
            if self.has_room(engine, asked.num_choices):
                widest = max(widest, engine.max_num_seqs + self._headroom)
            if engine.state is EngineState.SERVING:
                free += max(engine.max_num_seqs + self._headroom - engine.occupancy, 0)
        return widest > 0 and free - self._promised(asked) >= min(asked.num_choices, widest)

    def _promised(self, asked: Asked) -> int:
        """Places reserved in all lanes that may use the same engines."""
        return sum(
            seats
            for (model, revision), seats in self._reserved.items()
            if model == asked.model and (not revision or asked.revision in ("", revision))
        )

    def _reserve(self, asked: Asked) -> None:
        lane = _lane_of(asked)
        self._reserved[lane] = self._reserved.get(lane, 0) + asked.num_choices

    def _likely_wait_s(self, asked: Asked, queue: FairQueue[_Entry], allowed_s: float) -> float:
        """Seconds until the answer, as far as is known; 0 if nothing is.

        Engines that were idle have measured a low rate but could do more: what their places allow
        counts if it is more (Little's law).
        """
        service_s = self._service_s(asked)
        if not service_s:
            return 0.0
        places = sum(
            engine.max_num_seqs + self._headroom
            for engine in self._engines(asked)
            if engine.state is EngineState.SERVING
        )
        measured = self._rates[asked.model].per_s() if asked.model in self._rates else 0.0
        rate = max(measured, places / service_s)
        needed_s = max(service_s, self._needed_s(asked, allowed_s))
        return queue.ahead_of(asked.tenant) / rate + needed_s if rate else 0.0

    def _service_s(self, asked: Asked) -> float:
        times = self._times.get(asked.model)
        return 0.0 if times is None else times.of(asked.expected_output)

    def _last_start(self, entry: _Entry) -> float:
        """From when on it is not worth starting: its time would be wasted, others wait for it."""
        assert entry.deadline is not None
        return entry.deadline - self._needed_s(entry.asked, entry.allowed_s)

    def _needed_s(self, asked: Asked, allowed_s: float) -> float:
        """What must be left for an answer in time.

        Queues whose requests start when they can just be answered lose all those that take longer
        than the mean. So there must be enough for nearly all, but not more than the request came
        with: one with a short deadline that has hardly waited gets its chance.
        """
        times = self._times.get(asked.model)
        if times is None:
            return 0.0
        surely_s = min(times.surely(asked.expected_output), _HARDLY_WAITED * allowed_s)
        return max(_HOPELESS * times.of(asked.expected_output), surely_s)

    def _full(self, asked: Asked) -> FleetError:
        return self._refused(asked, f"the queue of model {asked.model} is full")

    def _refused(self, asked: Asked, why: str) -> FleetError:
        retry_s = self.retry_after_s(asked)
        return ResourceExhaustedError(
            f"{why}; try again in {retry_s:.1f} s", reason="QUEUE_FULL", retry_after_s=retry_s
        )


def _lane_of(asked: Asked) -> Lane:
    return asked.model, asked.revision


def no_engine(model: str, retry_after_s: float) -> UnavailableError:
    """Engines of this model are known, but none can take work now."""
    return UnavailableError(
        f"no engine of model {model} can take the request now",
        reason="NO_ENGINE",
        metadata={"model": model[:128]},
        retry_after_s=retry_after_s,
    )


def _expired() -> DeadlineExceededError:
    return DeadlineExceededError("the deadline passed before an engine had a place")
