"""The door: a request passes when an engine of its model has room, and waits in the queue if not.

Owns the queues and the places granted but not yet dispatched. Whoever gets a `Grant` must `use` or
`leave` it; `leave` is idempotent and right in every exit path.
"""

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from services.balancer.engine_view import Asked, EngineState, EngineView
from services.balancer.fair_queue import FairQueue, TenantCounters
from services.common.errors import (
    DeadlineExceededError,
    FleetError,
    ResourceExhaustedError,
    UnavailableError,
)

_RETRY_S = (0.5, 60.0)
_RATE_HALF_LIFE_S = 10.0


@dataclass(eq=False)
class Grant:
    """A right to dispatch one request, and the tenant's account while it runs."""

    admission: "Admission"
    model: str
    tenant: str
    reserved: bool = True
    left: bool = False

    def use(self) -> None:
        """The request was dispatched: from here on the engine's own count stands for it."""
        if self.reserved:
            self.reserved = False
            self.admission.release(self.model)

    def charge(self, weighted_tokens: float) -> None:
        """Tokens were served to the tenant."""
        self.admission.counters.charge(self.tenant, weighted_tokens)

    def leave(self) -> None:
        """The request has ended."""
        if not self.left:
            self.left = True
            self.use()
            self.admission.left(self)


@dataclass(eq=False)
class _Entry:
    asked: Asked
    granted: "asyncio.Future[None]" = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )


class DrainRate:
    """Requests ended per second, with older ones forgotten exponentially."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._weight = 0.0
        self._at = clock()
        self._since = self._at

    def ended(self) -> None:
        """One request has ended."""
        self._weight = self._decayed() + 1.0
        self._at = self._clock()

    def per_s(self) -> float:
        """The rate; 0 before the first end."""
        age_s = self._clock() - self._since
        tau_s = _RATE_HALF_LIFE_S / 0.693
        # A young average has seen less than one time constant.
        window_s = tau_s * (1.0 - math.exp(-max(age_s, 0.1) / tau_s))
        return self._decayed() / window_s

    def _decayed(self) -> float:
        halvings = (self._clock() - self._at) / _RATE_HALF_LIFE_S
        return self._weight * math.pow(0.5, halvings)


class Admission:
    """Owns the queues of all models.

    Args:
        views: frozen views of a model's engines now.
        queue_size: places per model.
        headroom: requests an engine takes beyond max_num_seqs.
        patience_s: how long to wait while no engine of the model is healthy.
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
        self._queues: dict[str, FairQueue[_Entry]] = {}
        self._reserved: dict[str, int] = {}
        self._rate = DrainRate(clock)

    def queued(self) -> dict[str, int]:
        """Requests waiting, by model."""
        return {model: len(queue) for model, queue in list(self._queues.items())}

    def has_room(self, engine: EngineView) -> bool:
        """Whether a new request may go to this engine."""
        return (
            engine.state is EngineState.SERVING
            and engine.occupancy < engine.max_num_seqs + self._headroom
        )

    async def enter(self, asked: Asked, timeout_s: float | None) -> Grant:
        """Wait for a place.

        Args:
            timeout_s: seconds to the request's deadline, or None.

        Raises:
            DeadlineExceededError: it passed while waiting; nothing was dispatched.
            ResourceExhaustedError: the queue is full, or a fairer claim took the place.
            UnavailableError: no engine of the model was healthy for `patience_s`.
        """
        deadline = None if timeout_s is None else self._clock() + timeout_s
        if timeout_s is not None and timeout_s <= 0:
            raise _expired()
        self.counters.enter(asked.tenant)
        try:
            await self._wait(asked, deadline)
        except BaseException:
            self.counters.leave(asked.tenant)
            self.pump()
            raise
        return Grant(self, asked.model, asked.tenant)

    def pump(self) -> None:
        """Hand free places to those who wait; call when room may have appeared."""
        for model, queue in list(self._queues.items()):
            if not queue:
                del self._queues[model]
                continue
            free = self._free(model)
            while free > 0 and (entry := queue.pop()) is not None:
                self._reserve(model)
                entry.granted.set_result(None)
                free -= 1

    def release(self, model: str) -> None:
        """For `Grant` only."""
        self._reserved[model] -= 1
        if not self._reserved[model]:
            del self._reserved[model]

    def left(self, grant: Grant) -> None:
        """For `Grant` only."""
        self.counters.leave(grant.tenant)
        self._rate.ended()
        self.pump()

    def retry_after_s(self, model: str) -> float:
        """When a place is likely, from the measured rate at which requests end."""
        waiting = len(self._queues.get(model, ())) + 1
        rate = self._rate.per_s()
        guess = waiting / rate if rate > 0 else 1.0
        return min(max(guess, _RETRY_S[0]), _RETRY_S[1])

    async def _wait(self, asked: Asked, deadline: float | None) -> None:
        model = asked.model
        queue = self._queues.get(model)
        if not queue and self._free(model) > 0:
            self._reserve(model)
            return
        if queue is None:
            queue = self._queues[model] = FairQueue(self._queue_size, self.counters)
        entry = _Entry(asked)
        offer = queue.offer(entry, asked.tenant, asked.priority)
        if offer.displaced is not None:
            offer.displaced.granted.set_exception(self._full(offer.displaced.asked))
        if not offer.accepted:
            raise self._full(asked)
        try:
            await self._until_granted(entry, deadline)
        except BaseException:
            if entry.granted.done() and entry.granted.exception() is None:
                self.release(model)  # granted in the very moment of giving up
            queue.remove(entry)
            raise

    async def _until_granted(self, entry: _Entry, deadline: float | None) -> None:
        model = entry.asked.model
        sick_since: float | None = None
        while not entry.granted.done():
            now = self._clock()
            if deadline is not None and now >= deadline:
                raise _expired()
            waits = [] if deadline is None else [deadline - now]
            healthy = any(e.state is EngineState.SERVING for e in self._views(model))
            sick_since = None if healthy else (now if sick_since is None else sick_since)
            if sick_since is not None:
                if now - sick_since >= self._patience_s:
                    raise no_engine(model, self.retry_after_s(model))
                waits.append(self._patience_s - (now - sick_since))
            # Health may change while waiting: look again now and then.
            await asyncio.wait({entry.granted}, timeout=min([*waits, max(self._patience_s, 0.1)]))
        entry.granted.result()

    def _free(self, model: str) -> int:
        limit = self._headroom
        free = sum(
            max(engine.max_num_seqs + limit - engine.occupancy, 0)
            for engine in self._views(model)
            if engine.state is EngineState.SERVING
        )
        return free - self._reserved.get(model, 0)

    def _reserve(self, model: str) -> None:
        self._reserved[model] = self._reserved.get(model, 0) + 1

    def _full(self, asked: Asked) -> FleetError:
        retry_s = self.retry_after_s(asked.model)
        return ResourceExhaustedError(
            f"the queue of model {asked.model} is full; try again in {retry_s:.1f} s",
            reason="QUEUE_FULL",
            retry_after_s=retry_s,
        )


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
