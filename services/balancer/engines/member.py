"""One engine as this balancer knows it: its record, its last report and what we have there now.

`Member` owns the in-flight count; it changes only by `dispatch` and the ticket's one `end`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto

import grpc

from inferfleet_proto.internal.v1 import engine_pb2
from services.balancer.engines.breaker import Breaker
from services.balancer.engines.decayed_sum import DecayedSum
from services.balancer.engines.engine_view import RECENT_S, EngineState, EngineView
from services.common.rpc.carrier import Link

# A report this soon after a dispatch may have been written before the request arrived.
CREDIT_GRACE_S = 0.02
MAX_PREFILL_ALLOWANCE_S = 60.0
LEAST_PREFILL_TOKENS_PER_S = 50.0
"""For the allowance alone: a first, tiny prefill measures little but its overhead, and none at all
is measured before it; neither may buy a short prompt a minute."""


class Outcome(Enum):
    """What a request's end says about its engine."""

    ANSWERED = auto()
    FAULT = auto()
    """The engine's own fault: UNAVAILABLE, INTERNAL, DATA_LOSS or a stall."""
    NEUTRAL = auto()
    """Nothing: the client left, or the request itself was refused."""


@dataclass(eq=False, slots=True)
class Ticket:
    """One request at one engine. `end` it exactly when the engine has it no more."""

    member: "Member"
    uncached_tokens: int
    blocks: int
    seats: int
    """Sequences that it runs there."""
    dispatched_at: float
    on_lost: Callable[[], object] | None = None
    """Called when the engine is given up: cancels the call to it."""
    lost: str = ""
    """Why the engine was given up under this request, if it was."""
    on_end: Callable[[], object] | None = None
    """Called once, when the engine has it no more."""
    credited: bool = True
    """Not yet contained in a load report."""
    begun: bool = False
    """The engine has given a message."""
    movable: bool = True
    """May be taken back before it has begun."""
    recalled: bool = False
    """Was taken back: no fault of the engine's."""
    ended: bool = False

    def take_back(self) -> None:
        """It waits there although another engine has room: cancels the call to this one."""
        self.recalled, self.movable = True, False
        if self.on_lost is not None:
            self.on_lost()

    def end(self, outcome: Outcome) -> None:
        """The engine has the request no more; idempotent, the first outcome counts."""
        if not self.ended:
            self.ended = True
            if self.on_end is not None:
                self.on_end()
            self.member.ended(self, outcome)


class Member:
    """One life (epoch) of one engine.

    Args:
        info: its record; replaced as a whole when the registry has news.
        channel: to its Engine service; owned by whoever made the member, as is `link`.
        link: how requests are sent there; None for a member that gets none.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        info: engine_pb2.EngineInfo,
        channel: grpc.aio.Channel,
        breaker: Breaker,
        *,
        stall_limit_s: float,
        clock: Callable[[], float],
        link: Link | None = None,
    ) -> None:
        self.info = info
        self.channel = channel
        self.link = link
        self.breaker = breaker
        self.registered = True
        self.connected = False
        """Whether its load reports come through."""
        self.ordered_to_drain = False
        self.stuck = False
        """Found stalled and no progress seen since: its streams have left, and that is no sign of
        health. The registry's sweep keeps it."""
        self.load: engine_pb2.LoadReport | None = None
        self._load_at = 0.0
        self._ended_since_report = 0
        self._tickets: set[Ticket] = set()
        self._stall_limit_s = stall_limit_s
        self._recent_uncached = DecayedSum(RECENT_S, clock)
        self._clock = clock

    @property
    def in_flight(self) -> int:
        """Our requests that it holds now."""
        return len(self._tickets)

    def dispatch(
        self,
        *,
        uncached_tokens: int,
        blocks: int,
        seats: int = 1,
        on_lost: Callable[[], object] | None = None,
    ) -> Ticket:
        """Count a request that is sent now."""
        now = self._clock()
        ticket = Ticket(self, uncached_tokens, blocks, seats, now, on_lost)
        self._tickets.add(ticket)
        self._recent_uncached.add(uncached_tokens)
        self.breaker.began(now)
        return ticket

    def ended(self, ticket: Ticket, outcome: Outcome) -> None:
        """For `Ticket.end` only."""
        self._tickets.discard(ticket)
        if not ticket.credited:
            self._ended_since_report += 1
        if outcome is Outcome.ANSWERED:
            self.breaker.succeeded()
        elif outcome is Outcome.FAULT:
            self.breaker.failed(self._clock())
        else:
            self.breaker.undecided()

    def report(self, load: engine_pb2.LoadReport) -> None:
        """Take a load report; dispatches that it contains are no longer credited."""
        now = self._clock()
        self.load, self._load_at, self._ended_since_report = load, now, 0
        self.connected = True
        for ticket in self._tickets:
            if ticket.credited and now - ticket.dispatched_at > CREDIT_GRACE_S:
                ticket.credited = False

    def give_up(self, reason: str) -> int:
        """End the calls of all requests there; each of them goes on elsewhere."""
        tickets = [ticket for ticket in self._tickets if not ticket.lost]
        for ticket in tickets:
            ticket.lost = reason
            if ticket.on_lost is not None:
                ticket.on_lost()
        return len(tickets)

    def unbegun(self) -> list[Ticket]:
        """Our requests there that may still be taken back."""
        return [t for t in self._tickets if t.movable and not t.begun and not t.lost]

    def stalled(self, now: float) -> bool:
        """Whether it is silent, or has work and makes no progress, for too long.

        Work is what it reports, or what we have there: the numbers of a core that stands still are
        those of its last round. A prefill of many tokens is given the time that it should take at
        the measured rate.
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
        # The core cannot have counted what came since it last answered.
        unseen = [t for t in self._tickets if now - t.dispatched_at <= age_s]
        if not load.waiting_requests and not load.running_requests:
            if not self._tickets:
                return False
            # Idle until our oldest request came: it has had no longer than that.
            age_s = min(age_s, now - min(t.dispatched_at for t in self._tickets))
        tokens = load.uncached_tokens_queued + sum(t.uncached_tokens for t in unseen)
        return age_s > self._stall_limit_s + _prefill_allowance_s(load, tokens)

    def state(self, now: float) -> EngineState:
        """Whether it gets new work."""
        if not self.connected:
            return EngineState.UNREACHABLE
        if self.stalled(now):
            return EngineState.STALLED
        if self.ordered_to_drain or self.info.draining or (self.load and self.load.draining):
            return EngineState.DRAINING
        return EngineState.SERVING if self.breaker.admits(now) else EngineState.OPEN

    def view(self, now: float) -> EngineView:
        """A frozen picture with our own recent dispatches credited."""
        info, load = self.info, self.load or engine_pb2.LoadReport()
        # One pass: this runs for every engine at every decision.
        own_seats = credited = uncached = blocks = 0
        for ticket in self._tickets:
            own_seats += ticket.seats
            if ticket.credited:
                credited += 1
                uncached += ticket.uncached_tokens
                blocks += ticket.blocks
        reported = load.waiting_requests + load.running_requests - self._ended_since_report
        # A report counts requests, not their choices; of ours we know how many there are.
        extra_seats = own_seats - len(self._tickets)
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
            max_num_seqs=info.max_num_seqs,
            in_flight=len(self._tickets),
            occupancy=max(own_seats, max(reported, 0) + credited + extra_seats),
            queued_uncached=load.uncached_tokens_queued + uncached,
            recent_uncached=self._recent_uncached.value,
            held_blocks=load.held_blocks + blocks,
            total_blocks=load.total_blocks or info.num_blocks,
            prefill_tokens_per_s=load.prefill_tokens_per_s,
            decode_round_s=load.decode_round_s,
        )


def _prefill_allowance_s(load: engine_pb2.LoadReport, tokens: int) -> float:
    rate = max(load.prefill_tokens_per_s, LEAST_PREFILL_TOKENS_PER_S)
    return min(tokens / rate, MAX_PREFILL_ALLOWANCE_S)
