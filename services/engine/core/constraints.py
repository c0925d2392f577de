"""`Constraints`: gets the grammar of a constrained request built and gives each choice a matcher.

A request is held out of admission until its grammar is built. All failures are values that end one
request.
"""

from collections.abc import Callable

from services.common.errors import UnimplementedError, Violation
from services.engine.contract.sampling_params import Constraint
from services.engine.core.failures import CONSTRAINT_VIOLATED, Failure
from services.engine.grammar.structured_output import (
    TOO_COSTLY,
    UNAVAILABLE,
    Built,
    SOMatcherBuilder,
)
from services.engine.scheduling.sequence import Request, Sequence

_SLOW = Failure(
    "FAILED_PRECONDITION",
    TOO_COSTLY,
    "matching a token against the constraint takes too long: its grammar is ambiguous",
)


class Constraints:
    """Owns the grammar builder and the requests that wait for it. One thread calls all methods."""

    def __init__(self, make_builder: Callable[[], SOMatcherBuilder] | None = None) -> None:
        """Args:
        make_builder: called at the first constraint; None serves no constraint.
        """
        self._make_builder = make_builder
        self._builder: SOMatcherBuilder | None = None
        self._held: dict[str, Request] = {}

    @property
    def num_held(self) -> int:
        """Requests that wait for their grammar."""
        return len(self._held)

    def warm(self) -> None:
        """Start the builder and wait until it has built a first grammar."""
        if self._make_builder is None or self._builder is not None:
            return
        self._builder = self._make_builder()
        self._builder.submit("", Constraint("regex", "a"))
        while not self._builder.pump():
            self._builder.wait(1.0)

    def check_served(self, request: Request) -> None:
        """Refuse a constraint if this engine serves none.

        Raises:
            UnimplementedError: naming the constraint's field.
        """
        constraint = request.params.constraint
        if constraint is not None and self._make_builder is None:
            field = f"constraint.{constraint.kind}"
            raise UnimplementedError(
                f"{field}: this engine has no tokenizer, so it serves no constraints",
                violations=(Violation(field, "not served"),),
            )

    def hold(self, request: Request) -> None:
        """Start building a request's grammar; `poll` returns the request once it is built.

        Raises:
            ValueError: the request has no constraint, or none is served.
        """
        constraint = request.params.constraint
        if constraint is None or self._make_builder is None:
            raise ValueError(f"request {request.key} has no constraint that can be built")
        if self._builder is None:
            self._builder = self._make_builder()
        request.hold()
        self._held[request.key] = request
        self._builder.submit(request.key, constraint)

    def drop(self, request: Request) -> None:
        """Cancel the grammar of a request that has ended, if it waits for one."""
        if self._held.pop(request.key, None) is not None and self._builder is not None:
            self._builder.cancel(request.key)

    def poll(self) -> list[tuple[Request, Failure | None]]:
        """Requests that no longer wait: their choices have matchers, or the request failed."""
        if not self._held or self._builder is None:
            return []
        return [self._attach(built) for built in self._builder.pump()]

    def wait(self, timeout_s: float) -> None:
        """Wait until `poll` has something, or for the timeout; return at once if none is held."""
        if self._held and self._builder is not None:
            self._builder.wait(timeout_s)

    def close(self) -> None:
        """End the compiler; idempotent."""
        if self._builder is not None:
            self._builder.close()

    def _attach(self, built: Built) -> tuple[Request, Failure | None]:
        request = self._held.pop(built.request_key)
        if built.grammar is None:
            return request, _not_built(request, built)
        request.unhold()
        for seq in request.choices:
            if seq.finished:
                continue
            matcher = built.grammar.matcher()
            # The grammar must have read the tokens that another engine generated.
            if not matcher.replay(seq.tokens[seq.num_prompt :]):
                return request, CONSTRAINT_VIOLATED
            seq.attach(matcher)
        return request, None


def advance(seq: Sequence, token_id: int) -> Failure | None:
    """Advance the sequence's grammar, if it has one, by a sampled token."""
    matcher = seq.matcher
    if matcher is None:
        return None
    if not matcher.accept(token_id):
        return CONSTRAINT_VIOLATED
    return _SLOW if matcher.slow else None


def _not_built(request: Request, built: Built) -> Failure:
    constraint = request.params.constraint
    field = f"constraint.{constraint.kind}" if constraint is not None else "constraint"
    message = f"{field}: {built.problem}"
    if built.reason == UNAVAILABLE:
        return Failure("UNAVAILABLE", built.reason, message)
    return Failure("INVALID_ARGUMENT", built.reason, message, field)
