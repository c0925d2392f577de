"""One engine as this balancer sees it: its registry record, its last load report, and the
requests that this balancer has there.

`Member` owns the requests in flight. They change only through `Member.dispatch` and
`Dispatch.end`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto

import grpc

from inferfleet_proto.internal.v1 import engine_pb2
from services.balancer.engines.breaker import Breaker
from services.balancer.engines.decayed_sum import DecayedSum
from services.balancer.engines.engine_view import RECENT_S, EngineState, EngineView
from services.common.rpc.carrier import CarrierConnection

# A report that arrives this soon after a dispatch may have been written before the request arrived.
CREDIT_GRACE_S = 0.02
MAX_PREFILL_ALLOWANCE_S = 60.0
SILENT_S = 5.0
"""Reports come each second; the connection of a process that has ended breaks at once."""
STOPPED_KEPT_S = 60.0
"""How long after its last report a stalled engine stays in the view without a registration."""
MIN_PREFILL_TOKENS_PER_S = 50.0
"""Lower bound of the prefill rate where a time is derived from it. A first, tiny prefill measures
little but its overhead, and before it no rate is measured at all; without the bound a short prompt
would get a minute."""


class Outcome(Enum):
    """What the end of a request shows about its engine."""

    ANSWERED = auto()
    FAULT = auto()
    """The engine's own fault: UNAVAILABLE, INTERNAL, DATA_LOSS or a stall."""
    NEUTRAL = auto()
    """Nothing: the client left, or the request itself was rejected."""


@dataclass(eq=False, slots=True)
class Dispatch:
    """One request at one engine, from the moment it is sent until `end`."""

    member: "Member"
    uncached_tokens: int
    """Prompt tokens that the engine has to compute."""
    blocks: int
    """KV blocks of the prompt."""
    slots: int
    """Sequences that the engine runs for the request."""
    dispatched_at: float
    """By the member's clock."""
    _cancel: Callable[[], object] | None
    _on_end: Callable[[], object] | None
    movable: bool
    """Whether the request may be recalled before its first message."""
    lost_reason: str | None = None
    """Why the engine was given up while it had the request; None if it was not."""
    unreported: bool = True
    """Whether no load report contains the request yet."""
    started: bool = False
    """Whether the engine has sent a message."""
    recalled: bool = False
    """Whether the balancer took the request back; no fault of the engine's."""
    ended: bool = False

    def mark_started(self) -> None:
        """Record the first message: the engine works, and the request stays there."""
        self.started = True
        self.member.breaker.succeeded()

    def recall(self) -> None:
        """Cancel the call: the request waits here although another engine has a free slot."""
        self.recalled, self.movable = True, False
        self._cancel_call()

    def lose(self, reason: str) -> None:
        """Cancel the call because the engine is given up."""
        self.lost_reason = reason
        self._cancel_call()

    def end(self, outcome: Outcome) -> None:
        """Record that the engine no longer has the request. Only the first call counts."""
        if not self.ended:
            self.ended = True
            if self._on_end is not None:
                self._on_end()
            self.member._end(self, outcome)

    def _cancel_call(self) -> None:
        if self._cancel is not None:
            self._cancel()


class Member:
    """One life (epoch) of one engine.

    Args:
        info: the engine's registry record.
        channel: channel to its Engine service. The creator of the member owns it, and `link` too.
        stall_limit_s: seconds without progress after which the engine counts as stalled.
        clock: monotonic seconds.
        link: sends requests to the engine; None for a member that gets no requests.
    """

    def __init__(
        self,
        info: engine_pb2.EngineInfo,
        channel: grpc.aio.Channel,
        breaker: Breaker,
        *,
        stall_limit_s: float,
        clock: Callable[[], float],
        link: CarrierConnection | None = None,
    ) -> None:
        self.info = info
        self.channel = channel
        self.link = link
        self.breaker = breaker
        self.registered = True
        """Whether the engine's key is in the registry."""
        self.connected = False
        """Whether its load reports arrive."""
        self.stuck = False
        """Whether the engine was found stalled and has shown no progress since. It stays stalled
        after its streams have moved away, because their leaving is no sign of health."""
        self.load: engine_pb2.LoadReport | None = None
        """The last load report."""
        self._drain_ordered = False
        self._refused = False
        self._fell_silent = False
        self._load_at = 0.0
        self._ended_since_report = 0
        self._dispatches: set[Dispatch] = set()
        self._stall_limit_s = stall_limit_s
        self._recent_uncached = DecayedSum(RECENT_S, clock)
        self._clock = clock

    @property
    def in_flight(self) -> int:
        """This balancer's requests at the engine."""
        return len(self._dispatches)

    def update_record(self, info: engine_pb2.EngineInfo) -> None:
        """Replace the registry record by a newer one of the same life."""
        self.info = info

    def set_registered(self, registered: bool) -> None:
        """Record whether the engine's key is in the registry."""
        self.registered = registered

    def mark_disconnected(self, *, refused: bool = False) -> None:
        """Record that no load reports arrive.

        Args:
            refused: nothing, or another process, listens at the engine's address.
        """
        if self.connected:
            self._fell_silent = self._clock() - self._load_at > SILENT_S
        self.connected = False
        self._refused = refused

    def may_wake(self, now: float) -> bool:
        """Whether the process may still exist without answering, as after SIGSTOP: it stalled, or
        fell silent before its connection broke, and its address does not refuse connections."""
        stopped = self.stuck or self._fell_silent
        return stopped and not self._refused and now - self._load_at <= STOPPED_KEPT_S

    def order_drain(self) -> None:
        """Take the engine out of routing for good."""
        self._drain_ordered = True

    def mark_stuck(self) -> bool:
        """Record that the engine stalled; returns whether that is new."""
        newly, self.stuck = not self.stuck, True
        return newly

    def clear_stuck(self) -> None:
        """Record that the engine makes progress."""
        self.stuck = False

    def dispatch(
        self,
        *,
        uncached_tokens: int,
        blocks: int,
        slots: int = 1,
        movable: bool = True,
        cancel: Callable[[], object] | None = None,
        on_end: Callable[[], object] | None = None,
    ) -> Dispatch:
        """Count a request that is sent now.

        Args:
            uncached_tokens: prompt tokens that the engine has to compute.
            blocks: KV blocks of the prompt.
            slots: sequences that the engine runs for the request.
            movable: whether the request may be recalled before its first message.
            cancel: cancels the call to the engine.
            on_end: called once, when the engine no longer has the request.
        """
        now = self._clock()
        dispatch = Dispatch(self, uncached_tokens, blocks, slots, now, cancel, on_end, movable)
        self._dispatches.add(dispatch)
        self._recent_uncached.add(uncached_tokens)
        self.breaker.began(now)
        return dispatch

    def apply_report(self, load: engine_pb2.LoadReport) -> None:
        """Store a load report. Dispatches that it contains are no longer added to it."""
        now = self._clock()
        self.load, self._load_at, self._ended_since_report = load, now, 0
        self.connected, self._refused, self._fell_silent = True, False, False
        for dispatch in self._dispatches:
            if dispatch.unreported and now - dispatch.dispatched_at > CREDIT_GRACE_S:
                dispatch.unreported = False

    def give_up(self, reason: str) -> int:
        """Cancel the calls of all requests here, so that each one resumes on another engine.

        Returns:
            The number of requests cancelled.
        """
        dispatches = [d for d in self._dispatches if d.lost_reason is None]
        for dispatch in dispatches:
            dispatch.lose(reason)
        return len(dispatches)

    def recallable(self) -> list[Dispatch]:
        """This balancer's requests here that may be recalled: no message has come yet."""
        return [
            d for d in self._dispatches if d.movable and not d.started and d.lost_reason is None
        ]

    def stalled(self, now: float) -> bool:
        """Whether the engine is silent, or has work and makes no progress, for `stall_limit_s`.

        Work is what the engine reports and what this balancer has sent it: a stopped core counts
        no new requests, so its reports keep showing those of its last round. The expected prefill
        time of the queued tokens extends the limit.
        """
        load = self.load
        if load is None:
            return False
        silent_s = now - self._load_at
        if silent_s > self._stall_limit_s:
            return True
        if not self.connected:
            return False
        age_s = load.last_progress_age_s + silent_s
        if age_s <= self._stall_limit_s or self.stuck:
            return age_s > self._stall_limit_s
        # The core cannot have counted requests that arrived after its last progress.
        uncounted = [d for d in self._dispatches if now - d.dispatched_at <= age_s]
        if not load.waiting_requests and not load.running_requests:
            if not self._dispatches:
                return False
            # The engine was idle until our oldest request arrived.
            age_s = min(age_s, now - min(d.dispatched_at for d in self._dispatches))
        tokens = load.uncached_tokens_queued + sum(d.uncached_tokens for d in uncounted)
        return age_s > self._stall_limit_s + _prefill_allowance_s(load, tokens)

    def state(self, now: float) -> EngineState:
        """The engine's state at time `now`."""
        if not self.connected:
            return EngineState.STALLED if self.may_wake(now) else EngineState.UNREACHABLE
        if self.stalled(now):
            return EngineState.STALLED
        if self._drain_ordered or self.info.draining or (self.load and self.load.draining):
            return EngineState.DRAINING
        return EngineState.SERVING if self.breaker.admits(now) else EngineState.OPEN

    def view(self, now: float) -> EngineView:
        """A frozen view: the last report and our dispatches that it does not contain."""
        info, load = self.info, self.load or engine_pb2.LoadReport()
        # One pass, because this runs for every engine at every decision.
        own_slots = unreported = uncached = blocks = 0
        for dispatch in self._dispatches:
            own_slots += dispatch.slots
            if dispatch.unreported:
                unreported += 1
                uncached += dispatch.uncached_tokens
                blocks += dispatch.blocks
        reported = load.waiting_requests + load.running_requests - self._ended_since_report
        # A report counts requests, not their choices. For our own requests we add the difference.
        extra_slots = own_slots - len(self._dispatches)
        return EngineView(
            engine_id=info.engine_id,
            epoch_ms=info.epoch_ms,
            model=info.model,
            state=self.state(now),
            revision=info.model_revision,
            numerics_id=info.numerics_id,
            deterministic=info.deterministic,
            hash_namespace=info.hash_namespace,
            block_size=info.block_size,
            needs_state=info.needs_state,
            max_num_seqs=info.max_num_seqs,
            in_flight=len(self._dispatches),
            occupancy=max(own_slots, max(reported, 0) + unreported + extra_slots),
            queued_uncached=load.uncached_tokens_queued + uncached,
            recent_uncached=self._recent_uncached.value,
            held_blocks=load.held_blocks + blocks,
            total_blocks=load.total_blocks or info.num_blocks,
            prefill_tokens_per_s=load.prefill_tokens_per_s,
            decode_round_s=load.decode_round_s,
        )

    def _end(self, dispatch: Dispatch, outcome: Outcome) -> None:
        self._dispatches.discard(dispatch)
        if not dispatch.unreported:
            self._ended_since_report += 1
        if outcome is Outcome.ANSWERED:
            self.breaker.succeeded()
        elif outcome is Outcome.FAULT:
            self.breaker.failed(self._clock())
        else:
            self.breaker.undecided()


def _prefill_allowance_s(load: engine_pb2.LoadReport, tokens: int) -> float:
    rate = max(load.prefill_tokens_per_s, MIN_PREFILL_TOKENS_PER_S)
    return min(tokens / rate, MAX_PREFILL_ALLOWANCE_S)
