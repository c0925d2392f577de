"""Makes one routing decision: filters the engines of a model, then lets the policy choose."""

import logging
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from random import Random
from typing import NamedTuple

from services.balancer.engines.engine_view import (
    Candidate,
    Choice,
    CostModel,
    EngineLife,
    EngineState,
    EngineView,
    RoutingRequest,
    Situation,
)
from services.balancer.routing.policies import POLICIES, Policy, find_policy
from services.balancer.routing.prefix_match import Matches

log = logging.getLogger(__name__)

_LOG_EVERY_S = 60.0


@dataclass(frozen=True)
class Origin:
    """The engine where a broken stream began, and the rule for the engines that may resume it."""

    engine: EngineView
    rule: str
    """One of config.RESUME_RULES."""

    def allows(self, other: EngineView, *, greedy: bool) -> bool:
        """Whether `other` may resume the stream."""
        if self.rule == "never":
            return False
        if self.rule == "any":
            return other.revision == self.engine.revision
        equal = bool(other.numerics_id) and other.numerics_id == self.engine.numerics_id
        return equal and (self.rule == "equal" or greedy or self.exact(other))

    def exact(self, other: EngineView) -> bool:
        """Whether the resumed stream has the same tokens as an undisturbed one."""
        return (
            other.numerics_id == self.engine.numerics_id
            and other.deterministic
            and self.engine.deterministic
        )


class RoutingResult(NamedTuple):
    """A decision: the policy's choice and the candidates it was made from."""

    choice: Choice
    candidates: tuple[Candidate, ...]

    @property
    def engine(self) -> EngineView:
        """The chosen engine."""
        return self.choice.candidate.engine


class Router:
    """Applies the configured policy. Owns only the count of decisions and the random generator.

    Args:
        policy: name of the policy, as in the configuration.
        views: frozen views of a model's engines, as of now.
        has_free_slots: whether an engine has that many free slots. Engines without them are
            candidates only if no engine has them.
        rng: the policy's source of randomness.
        observe: gets the seconds of each choice.
    """

    def __init__(
        self,
        policy: str,
        views: Callable[[str], Sequence[EngineView]],
        has_free_slots: Callable[[EngineView, int], bool],
        *,
        cost: CostModel,
        rng: Random,
        observe: Callable[[float], None] = lambda seconds: None,
    ) -> None:
        self.policy_name = policy
        self._policy = find_policy(policy)
        if policy not in POLICIES:
            self._policy = _with_fallback(policy, self._policy)
        self._views = views
        self._has_free_slots = has_free_slots
        self._cost = cost
        self._rng = rng
        self._observe = observe
        self._turn = 0

    def eligible(
        self,
        request: RoutingRequest,
        excluded: Collection[EngineLife] = (),
        origin: Origin | None = None,
    ) -> list[EngineView]:
        """Healthy engines that may serve the request: those with free slots, or all if none has.

        Args:
            excluded: engines that must not be tried.
            origin: set for a broken stream: only engines that may resume it are eligible.
        """
        fit = [
            engine
            for engine in self._views(request.model)
            if engine.state is EngineState.SERVING
            and engine.life not in excluded
            and request.numerics_id in ("", engine.numerics_id)
            and request.revision in ("", engine.revision)
            and (origin is None or origin.allows(engine, greedy=request.greedy))
        ]
        return [e for e in fit if self._has_free_slots(e, request.num_choices)] or fit

    def choose(
        self, request: RoutingRequest, engines: Sequence[EngineView], matches: Matches
    ) -> RoutingResult:
        """Let the policy choose among `engines`, which must not be empty."""
        began = time.perf_counter()
        candidates = tuple(Candidate(engine, matches.matched_tokens(engine)) for engine in engines)
        choice = self._policy(Situation(request, candidates, self._cost, self._turn), self._rng)
        self._turn += 1
        self._observe(time.perf_counter() - began)
        return RoutingResult(choice, candidates)


def _with_fallback(name: str, policy: Policy) -> Policy:
    """Wrap a policy of a user: where it fails, `least_time` chooses, so that no request is lost."""
    silent_until = 0.0

    def choose(situation: Situation, rng: Random) -> Choice:
        nonlocal silent_until
        try:
            choice = policy(situation, rng)
            if choice.candidate in situation.candidates:
                return choice
            problem = "it chose an engine that is not a candidate"
        except Exception as error:  # foreign code may raise anything
            problem = f"{type(error).__name__}: {error}"
        if time.monotonic() >= silent_until:
            silent_until = time.monotonic() + _LOG_EVERY_S
            log.error("policy %s failed, least_time chose instead: %s", name, problem)
        return POLICIES["least_time"](situation, rng)

    return choose
