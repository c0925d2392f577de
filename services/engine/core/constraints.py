"""The constraints of a core's requests: a grammar asked for on arrival, then a matcher a choice.

A request waits here, held out of admission, until its grammar is built. All failures are values
that end one request.
"""

from collections.abc import Callable
from typing import NamedTuple

from services.common.errors import UnimplementedError, Violation
from services.engine.contract.sampling_params import Constraint
from services.engine.grammar.structured_output import (
    TOO_COSTLY,
    UNAVAILABLE,
    Built,
    SOMatcherBuilder,
)
from services.engine.scheduling.sequence import Request, Sequence


class Failure(NamedTuple):
    """How a request ends: the fields of `RequestFailure` after its key."""

    code: str
    reason: str
    message: str
    field: str | None = None


_REFUSED = Failure(
    "FAILED_PRECONDITION",
    "CONSTRAINT_UNSATISFIABLE",
    "the answer so far does not fit the request's constraint",
)
_SLOW = Failure(
    "FAILED_PRECONDITION",
    TOO_COSTLY,
    "the constraint takes too long to follow: its grammar is ambiguous",
)


class Constraints:
    """Owner of the builder and of who waits for it. One thread calls everything."""

    def __init__(self, make_builder: Callable[[], SOMatcherBuilder] | None = None) -> None:
        """Args: what makes the builder at the first constraint; None serves no constraint."""
        self._make_builder = make_builder
        self._builder: SOMatcherBuilder | None = None
        self._held: dict[str, Request] = {}

    @property
    def num_held(self) -> int:
        """Requests that wait for their grammar."""
        return len(self._held)

    def warm(self) -> None:
        """Start the builder and wait until it has built something, so that no request has to."""
        if self._make_builder is None or self._builder is not None:
            return
        self._builder = self._make_builder()
        self._builder.submit("", Constraint("regex", "a"))
        while not self._builder.pump():
            self._builder.wait(1.0)

    def check_served(self, request: Request) -> None:
        """Raises UnimplementedError for a constraint where none is served."""
        constraint = request.params.constraint
        if constraint is not None and self._make_builder is None:
            field = f"constraint.{constraint.kind}"
            raise UnimplementedError(
                f"{field}: this engine does not constrain its output",
                violations=(Violation(field, "not served"),),
            )

    def hold(self, request: Request) -> None:
        """Ask for a request's grammar; `poll` says when it is there."""
        constraint = request.params.constraint
        if constraint is None or self._make_builder is None:
            raise ValueError(f"request {request.key} has no constraint to be held for")
        if self._builder is None:
            self._builder = self._make_builder()
        request.held = True
        self._held[request.key] = request
        self._builder.submit(request.key, constraint)

    def drop(self, request: Request) -> None:
        """The request has ended: nobody waits for its grammar."""
        if self._held.pop(request.key, None) is not None and self._builder is not None:
            self._builder.cancel(request.key)

    def poll(self) -> list[tuple[Request, Failure | None]]:
        """Requests that wait no longer: their choices have matchers, or they failed."""
        if not self._held or self._builder is None:
            return []
        return [self._let_go(built) for built in self._builder.pump()]

    def wait(self, timeout_s: float) -> None:
        """Until `poll` has something, or the timeout; at once if nobody is held."""
        if self._held and self._builder is not None:
            self._builder.wait(timeout_s)

    def close(self) -> None:
        """End the compiler; idempotent."""
        if self._builder is not None:
            self._builder.close()

    def _let_go(self, built: Built) -> tuple[Request, Failure | None]:
        request = self._held.pop(built.request_key)
        if built.grammar is None:
            return request, _not_built(request, built)
        request.held = False
        for seq in request.choices:
            if seq.finished:
                continue
            matcher = built.grammar.matcher()
            # What another engine generated is in the grammar already.
            if not matcher.replay(seq.tokens[seq.num_prompt :]):
                return request, _REFUSED
            seq.matcher = matcher
        return request, None


def advance(seq: Sequence, token_id: int) -> Failure | None:
    """Take a drawn token into the sequence's grammar, if it has one."""
    matcher = seq.matcher
    if matcher is None:
        return None
    if not matcher.accept(token_id):
        return _REFUSED
    return _SLOW if matcher.slow else None


def _not_built(request: Request, built: Built) -> Failure:
    constraint = request.params.constraint
    field = f"constraint.{constraint.kind}" if constraint is not None else "constraint"
    message = f"{field}: {built.problem}"
    if built.reason == UNAVAILABLE:
        return Failure("UNAVAILABLE", built.reason, message)
    return Failure("INVALID_ARGUMENT", built.reason, message, field)
