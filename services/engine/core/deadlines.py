"""Deadlines: refuses requests that cannot meet theirs, and finds the ones whose deadline passed.

A request is refused only if it is certain to be late. The time to its first token is estimated from
below: the positions that are surely computed before it, at the highest rate measured recently.
Without a measured rate no request is refused.
"""

import heapq
from collections.abc import Iterator

from services.common.errors import DeadlineExceededError, FleetError, ResourceExhaustedError
from services.engine.scheduling.block_manager import BlockManager
from services.engine.scheduling.scheduler import Scheduler
from services.engine.scheduling.sequence import Request

UNREACHABLE = "DEADLINE_UNREACHABLE"
_MIN_KEPT = 64
"""Entries of the heap below which ended requests are not dropped."""


class Deadlines:
    """The deadlines of open requests, the earliest first."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Request]] = []

    def __len__(self) -> int:
        """Number of entries, ended requests included until they are dropped."""
        return len(self._heap)

    def watch(self, request: Request, num_open: int) -> None:
        """Add a request, if it has a deadline.

        Args:
            num_open: requests that have not ended; if there are far more entries than that, those
                of ended requests are dropped.
        """
        if request.deadline_unix_s is None:
            return
        if len(self._heap) > max(_MIN_KEPT, 2 * num_open):
            self._heap = [entry for entry in self._heap if entry[2].open_choices]
            heapq.heapify(self._heap)
        heapq.heappush(self._heap, (request.deadline_unix_s, request.arrival, request))

    def passed(self, now_s: float) -> Iterator[Request]:
        """Open requests whose deadline has passed; each is returned once."""
        while self._heap and self._heap[0][0] <= now_s:
            _, _, request = heapq.heappop(self._heap)
            if request.open_choices:
                yield request


def refusal(
    left_s: float, own_tokens: int, tokens_ahead: int, tokens_per_s: float
) -> FleetError | None:
    """Why a request cannot get its first token in time; None if that is not certain.

    A request whose deadline has passed already is not refused: the next round ends it.

    Args:
        left_s: seconds until its deadline.
        own_tokens: positions of its own prompt to compute.
        tokens_ahead: positions of other prompts that are computed before.
        tokens_per_s: the highest recent rate; 0 if none is measured.
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
            f"the prompt alone takes {own_s:.2g} s here, the deadline is in {left_s:.2g} s",
            reason=UNREACHABLE,
            metadata=facts,
        )
    return ResourceExhaustedError(
        f"{tokens_ahead} prompt tokens of other requests are computed first and take "
        f"{ahead_s:.2g} s, the deadline is in {left_s:.2g} s",
        reason=UNREACHABLE,
        metadata=facts,
        retry_after_s=min(60.0, max(0.1, own_s + ahead_s - left_s)),
    )


def check_deadline(
    request: Request, now_s: float, tokens_per_s: float, scheduler: Scheduler, blocks: BlockManager
) -> None:
    """Refuse a new request that cannot get its first token in time.

    Args:
        now_s: Unix time.
        tokens_per_s: the highest recent prefill rate; 0 if none is measured.

    Raises:
        DeadlineExceededError: its own prompt takes too long.
        ResourceExhaustedError: the prompts before it take too long.
    """
    if request.deadline_unix_s is None or not request.choices:
        return
    seq = request.choices[0]
    left_s = request.deadline_unix_s - now_s
    most = scheduler.uncached_tokens_queued()
    if refusal(left_s, len(seq.tokens), most, tokens_per_s) is None:
        return  # in time even if nothing of any prompt is cached
    ahead = scheduler.certain_ahead(seq)
    own = blocks.count_uncached([seq])
    both = blocks.count_uncached([*ahead, seq])
    error = refusal(left_s, own, both - own, tokens_per_s)
    if error is not None:
        raise error
