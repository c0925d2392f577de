"""One routing decision: filter the engines of a model, ask the policy, write down why."""

import logging
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from random import Random

from services.balancer.engines.engine_view import (
    Asked,
    Candidate,
    Choice,
    CostModel,
    EngineState,
    EngineView,
    Situation,
)
from services.balancer.routing.policies import POLICIES, Policy, find_policy
from services.balancer.routing.prefix_holds import EngineLife
from services.balancer.routing.prefix_match import Matches

log = logging.getLogger(__name__)

_LOG_EVERY_S = 60.0


@dataclass(frozen=True)
class Origin:
    """Where a stream began that must be carried on, and where it may go."""

    engine: EngineView
    rule: str
    """One of config.CARRY_ON."""

    def allows(self, other: EngineView, *, greedy: bool) -> bool:
        """Whether `other` may carry the stream on."""
        if self.rule == "never":
            return False
        if self.rule == "any":
            return other.revision == self.engine.revision
        equal = bool(other.numerics_id) and other.numerics_id == self.engine.numerics_id
        return equal and (self.rule == "equal" or greedy or self.exact(other))

    def exact(self, other: EngineView) -> bool:
        """Whether `other` yields the very tokens of the undisturbed run."""
        return (
            other.numerics_id == self.engine.numerics_id
            and other.deterministic
            and self.engine.deterministic
        )


class Router:
    """Applies the configured policy; owns only the count of decisions and the source of chance.

    Args:
        views: frozen views of a model's engines now.
        has_room: whether an engine has so many places left; full ones are a last resort.
    """

    def __init__(
        self,
        policy: str,
        views: Callable[[str], Sequence[EngineView]],
        has_room: Callable[[EngineView, int], bool],
        *,
        cost: CostModel,
        rng: Random,
        observe: Callable[[float], None] = lambda seconds: None,
    ) -> None:
        self.policy_name = policy
        self._policy = find_policy(policy)
        if policy not in POLICIES:
            self._policy = _guarded(policy, self._policy)
        self._views = views
        self._has_room = has_room
        self._cost = cost
        self._rng = rng
        self._observe = observe
        self._turn = 0

    def eligible(
        self, asked: Asked, excluded: Collection[EngineLife] = (), origin: Origin | None = None
    ) -> list[EngineView]:
        """Healthy engines that may serve the request; those with room if any has."""
        fit = [
            engine
            for engine in self._views(asked.model)
            if engine.state is EngineState.SERVING
            and (engine.engine_id, engine.epoch_ms) not in excluded
            and asked.numerics_id in ("", engine.numerics_id)
            and asked.revision in ("", engine.revision)
            and (origin is None or origin.allows(engine, greedy=asked.greedy))
        ]
        return [e for e in fit if self._has_room(e, asked.num_choices)] or fit

    def choose(
        self, asked: Asked, engines: Sequence[EngineView], matches: Matches
    ) -> tuple[Choice, tuple[Candidate, ...]]:
        """The policy's choice among `engines` (not empty) and what it was made from."""
        began = time.perf_counter()
        candidates = tuple(Candidate(engine, matches.of(engine)) for engine in engines)
        choice = self._policy(Situation(asked, candidates, self._cost, self._turn), self._rng)
        self._turn += 1
        self._observe(time.perf_counter() - began)
        return choice, candidates


def _guarded(name: str, policy: Policy) -> Policy:
    """A policy that is not ours: where it fails, `least_time` chooses and no request is lost."""
    silent_until = 0.0

    def choose(situation: Situation, rng: Random) -> Choice:
        nonlocal silent_until
        try:
            choice = policy(situation, rng)
            if choice.candidate in situation.candidates:
                return choice
            problem = "it chose an engine that is no candidate"
        except Exception as error:  # an edge: foreign code
            problem = f"{type(error).__name__}: {error}"
        if time.monotonic() >= silent_until:
            silent_until = time.monotonic() + _LOG_EVERY_S
            log.error("policy %s failed, least_time chose instead: %s", name, problem)
        return POLICIES["least_time"](situation, rng)

    return choose
