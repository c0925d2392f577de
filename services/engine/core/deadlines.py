"""Deadlines of open requests: what cannot meet its own is refused, what has passed it is ended.

Only what is certain refuses. The time to a first token is taken as the positions that surely come
before it, at the highest rate measured lately; the true time is longer. Without a measured rate
nobody is refused.
"""

import heapq
from collections.abc import Iterator

from services.common.errors import DeadlineExceededError, FleetError, ResourceExhaustedError
from services.engine.scheduling.sequence import Request

UNREACHABLE = "DEADLINE_UNREACHABLE"
_LEAST_KEPT = 64


class Deadlines:
    """Owner of the order in which requests expire."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Request]] = []

    def __len__(self) -> int:
        """Requests that are remembered, ended ones included until they are dropped."""
        return len(self._heap)

    def watch(self, request: Request, num_open: int) -> None:
        """Remember a request's deadline, if it has one.

        Args:
            num_open: requests that have not ended; far more entries than that are mostly dead.
        """
        if request.deadline_unix_s is None:
            return
        if len(self._heap) > max(_LEAST_KEPT, 2 * num_open):
            self._heap = [entry for entry in self._heap if entry[2].open_choices]
            heapq.heapify(self._heap)
        heapq.heappush(self._heap, (request.deadline_unix_s, request.arrival, request))

    def passed(self, now_s: float) -> Iterator[Request]:
        """Requests that are still open past their deadline; each once."""
        while self._heap and self._heap[0][0] <= now_s:
            _, _, request = heapq.heappop(self._heap)
            if request.open_choices:
                yield request


def refusal(
    left_s: float, own_tokens: int, tokens_ahead: int, tokens_per_s: float
) -> FleetError | None:
    """Why a request cannot have its first token in time; None if that is not certain.

    One whose deadline has passed is none of these: the next round ends it before anything else.

    Args:
        left_s: seconds until its deadline.
        own_tokens: positions of its own that are to be computed.
        tokens_ahead: positions of others that are computed before them.
        tokens_per_s: the highest rate of late; 0 is none measured.
    """
    if left_s <= 0 or tokens_per_s <= 0 or (own_tokens + tokens_ahead) / tokens_per_s <= left_s:
        return None
    facts = {
        "prompt_tokens_to_compute": str(own_tokens),
        "tokens_ahead": str(tokens_ahead),
        "tokens_per_s": f"{tokens_per_s:.0f}",
    }
    own_s, ahead_s = own_tokens / tokens_per_s, tokens_ahead / tokens_per_s
    if own_s > left_s:
        return DeadlineExceededError(
            f"the prompt alone takes {own_s:.2g} s here, {left_s:.2g} s are left",
            reason=UNREACHABLE,
            metadata=facts,
        )
    return ResourceExhaustedError(
        f"{tokens_ahead} tokens of others go first and take {ahead_s:.2g} s, {left_s:.2g} s are "
        "left",
        reason=UNREACHABLE,
        metadata=facts,
        retry_after_s=min(60.0, max(0.1, own_s + ahead_s - left_s)),
    )
