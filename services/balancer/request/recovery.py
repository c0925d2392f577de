"""One request's attempts: what the client has, who has failed, who may go on, when to end.

Owns the request's `StreamLedger`. Knows nothing of calls and sockets.
"""

import time

from services.balancer.config import BalancerConfig
from services.balancer.engines.engine_view import Asked, EngineView
from services.balancer.request.failure import Failure
from services.balancer.request.incoming import Incoming, for_attempt
from services.balancer.routing.prefix_holds import EngineLife
from services.balancer.routing.router import Origin
from services.common.errors import AbortedError, FleetError, UnavailableError
from services.common.rpc.continuation import StreamLedger

# A dead engine's load reports end together with its streams; then it is no candidate at all.
_BLIP_S = 0.5


class Recovery:
    """Built per request, beside its Exchange."""

    def __init__(self, config: BalancerConfig, incoming: Incoming, asked: Asked) -> None:
        base = incoming.request.continuation if incoming.request.HasField("continuation") else None
        self._config = config
        self._incoming = incoming
        self._asked = asked
        self._last: Failure | None = None
        self._without_progress = 0
        self.ledger = StreamLedger(asked.num_choices, base)
        self.attempts = 0
        """Attempts that have failed or were taken back."""
        self.excluded: set[EngineLife] = set()
        """Lives of engines that failed since the stream last made progress."""
        self._lost_at: dict[EngineLife, float] = {}
        self.moved = False
        """Taken back once already."""
        self.origin: Origin | None = None
        """Set once the client has a part of the stream: only some engines may go on from there."""

    @property
    def number(self) -> int:
        """Of the attempt to come, as engines see it."""
        return self._incoming.request.attempt + self.attempts

    @property
    def patience_s(self) -> float:
        """How long to wait for an engine that may take the request."""
        config = self._config
        return config.patience_s if self.origin is None else config.carry_on_wait_s

    def barred(self, now: float = float("inf")) -> set[EngineLife]:
        """The excluded ones that may not be tried even if there is nobody else.

        An engine that answered with an error would do so again; one whose connection broke may be
        well, and serving for everybody else, a moment later.

        Args:
            now: by time.monotonic(); default: once that moment has passed.
        """
        lost = self._lost_at
        return {life for life in self.excluded if life not in lost or now - lost[life] < _BLIP_S}

    def request_to(self, engine: EngineView) -> bytes:
        """The bytes to send to the engine that was chosen."""
        if not self.attempts:
            return self._incoming.raw
        numerics_id = ""
        if self.origin is not None and self.origin.rule in ("exact", "equal"):
            numerics_id = engine.numerics_id
        continuation = self.ledger.continuation()
        return for_attempt(self._incoming, self.number, continuation, numerics_id)

    def accept(self, engine: EngineView, raw: bytes, *, first: bool) -> bytes | None:
        """Take a message of the running attempt; returns what the client gets of it.

        Args:
            first: it is the attempt's first.

        Raises:
            InternalError: the engine does not speak the protocol.
        """
        if first and self.origin is not None:
            self.ledger.resume(exact=self.origin.exact(engine))
        out = self.ledger.accept(raw)
        if out is not None:
            self._without_progress = 0
            # A long stream may outlive a fault of every engine: one that has recovered may have it.
            self.excluded.clear()
            self._lost_at.clear()
        return out

    def failed(
        self, engine: EngineView, failure: Failure, *, silent: bool, retry_after_s: float
    ) -> bytes | None:
        """An attempt has failed: prepare the next one, or end.

        Args:
            silent: it had not given a message.

        Returns:
            The stream's last message if nothing but that is missing, else None: try again.

        Raises:
            FleetError: the request cannot go on.
        """
        if not failure.elsewhere(silent=silent):
            raise failure.error
        life = engine.engine_id, engine.epoch_ms
        self.excluded.add(life)
        if failure.lost:
            self._lost_at[life] = time.monotonic()
        self.attempts += 1
        self._without_progress += 1
        self._last = failure
        if not self.ledger.empty:
            closing = self.ledger.closing()
            if closing is not None:
                return closing
            self._set_origin(engine)
        if self._without_progress >= self._config.max_attempts:
            raise self.nobody(retry_after_s)
        return None

    def recalled(self, engine: EngineView) -> None:
        """An attempt was taken back before it began: no failure, and the engine is no worse."""
        life = engine.engine_id, engine.epoch_ms
        self.excluded.add(life)
        self._lost_at[life] = float("-inf")  # it may have it again if there is nobody else
        self.attempts += 1
        self.moved = True

    def nobody(self, retry_after_s: float) -> FleetError:
        """What the client is told when no engine is left to try."""
        if self.ledger.has_output and not self.ledger.empty:
            return self._aborted()
        if self._last is not None:
            return self._last.told(retry_after_s)
        return UnavailableError(
            f"no engine of model {self._asked.model} can take the request now",
            reason="NO_ENGINE",
            metadata={"model": self._asked.model[:128]},
            retry_after_s=retry_after_s,
        )

    def _set_origin(self, engine: EngineView) -> None:
        # Before the first token any engine of the same weights gives the client what it expects.
        rule = self._config.carry_on if self.ledger.has_output else "any"
        first = engine if self.origin is None else self.origin.engine
        self.origin = Origin(first, rule)

    def _aborted(self) -> AbortedError:
        started = self.ledger.started
        cause = self._last.error.message if self._last is not None else "the engine is gone"
        return AbortedError(
            f"the stream broke after {self.ledger.num_tokens} tokens and no engine carried it on: "
            f"{cause}",
            metadata={
                "prompt_tokens": str(started.prompt_tokens if started is not None else 0),
                "completion_tokens": str(self.ledger.num_tokens),
                "attempts": str(self.number),
            },
        )
