"""Which blocks matter to a model whose layers all slide; pure functions.

A row at position p attends to positions p - window + 1 to p. So a round that begins at `start`
needs no keys and values before start - window + 1, and neither does any later round.
"""

from collections.abc import Sequence


def first_in_window(start: int, window: int) -> int:
    """The first position that a round which begins at `start` attends to.

    Args:
        window: positions, the row's own included; 0 if there is no window.
    """
    return max(0, start - window + 1) if window else 0


def longest_prefix(
    found: Sequence[int | None], block_size: int, window: int, length: int
) -> list[int]:
    """The longest prefix whose last window is cached.

    Args:
        found: per block of the prompt, the block with its content; None if it is not cached.
        length: tokens of the prompt. The last one is always computed, to sample from it.

    Returns:
        The blocks of the prefix, 0 for those before the window of what follows it; empty if none
        is usable.
    """
    run = 0
    runs = [run := run + 1 if block is not None else 0 for block in found]
    for depth in range(len(found), 0, -1):
        start = min(depth * block_size, length - 1)
        first = min(depth - 1, first_in_window(start, window) // block_size)
        if runs[depth - 1] >= depth - first:
            return [0] * first + [block for block in found[first:depth] if block is not None]
    return []
