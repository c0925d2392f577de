"""The scheduler's decisions as pure functions of what they are shown; chosen by name in config."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

Order = Callable[[int, int, int], tuple[int, ...]]
"""(priority, arrival, choice) → rank; the lowest goes first."""


def fcfs(priority: int, arrival: int, choice: int) -> tuple[int, ...]:
    """First come, first served."""
    return (arrival, choice)


def by_priority(priority: int, arrival: int, choice: int) -> tuple[int, ...]:
    """The highest priority first; equal ones in the order of arrival."""
    return (-priority, arrival, choice)


ORDERS: Mapping[str, Order] = {"fcfs": fcfs, "priority": by_priority}


class Victim(NamedTuple):
    """What preempting one sequence would mean."""

    seq_id: int
    priority: int
    lost_tokens: int
    """Positions that would be computed again."""
    freed_blocks: int
    arrival: int


def choose_victim(candidates: Sequence[Victim]) -> int | None:
    """The sequence to preempt: lowest priority, then least work lost per block, then youngest.

    One that frees no block (all are shared) is no help and never chosen.
    """
    useful = [c for c in candidates if c.freed_blocks > 0]
    if not useful:
        return None
    return min(
        useful, key=lambda c: (c.priority, c.lost_tokens / c.freed_blocks, -c.arrival, -c.seq_id)
    ).seq_id


class PrefillShare:
    """How a round's prefill budget is given out, first come first served, in two classes.

    A prompt longer than the whole budget leaves up to half of it to shorter ones behind it, so
    that nobody's first token waits for a long prompt of someone else; unused halves are not lost.
    """

    def __init__(self, remaining: Sequence[int], budget: int) -> None:
        """Args: tokens still to be computed by each contender, and the tokens of this round."""
        self.left = budget
        self._long_above = budget
        short_need = sum(n for n in remaining if n <= budget)
        self._long_left = budget - min(short_need, budget // 2)

    def offer(self, remaining: int) -> int:
        """Tokens that one contender may take now."""
        if remaining > self._long_above:
            return min(remaining, self._long_left, self.left)
        return min(remaining, self.left)

    def take(self, remaining: int, taken: int) -> None:
        """It took so many of its `remaining`."""
        self.left -= taken
        if remaining > self._long_above:
            self._long_left -= taken


def retry_after_s(waiting: int, drain_per_s: float) -> float:
    """When a refused request may come back: half the queue's time, within 0.1 to 60 seconds."""
    if drain_per_s <= 0:
        return 1.0
    return min(60.0, max(0.1, waiting / 2 / drain_per_s))
