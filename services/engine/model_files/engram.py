"""Primes and factors of DeepSeek V4.1's look-ups by n-gram (Engram).

The tables are trained for these exact numbers, and the files hold none of them. A mistake is found
by `engram_num_embeddings` of the configuration, which is the sum of a table's primes.
"""

from collections.abc import Sequence

from services.engine.contract.deepseek_v41 import EngramTable

_LARGEST = 2**63 - 1
_SEED = 10007


def engram_tables(
    layers: Sequence[int], *, start: int, longest: int, heads: int, num_ids: int
) -> tuple[EngramTable, ...]:
    """The tables of all layers with look-ups.

    Args:
        start: the primes of each n-gram begin here; none is used twice.
        longest: tokens of the longest n-gram.
        num_ids: compressed token ids; products of factor and id stay below 2**63.
    """
    used: set[int] = set()
    return tuple(
        EngramTable(
            layer,
            _factors(layer, longest, num_ids),
            tuple(_next_primes(start, heads, used) for _ in range(longest - 1)),
        )
        for layer in layers
    )


def _factors(layer: int, longest: int, num_ids: int) -> tuple[int, ...]:
    import numpy as np  # the command reads configurations too, and must start fast

    top = max(1, _LARGEST // num_ids // 2)
    drawn = np.random.default_rng(_SEED * layer).integers(0, top, size=longest, dtype=np.int64)
    return tuple(2 * int(number) + 1 for number in drawn)


def _next_primes(start: int, count: int, used: set[int]) -> tuple[int, ...]:
    """The first primes from `start` on that are not in `used`, to which they are added."""
    found: list[int] = []
    number = start
    while len(found) < count:
        if number not in used and _is_prime(number):
            found.append(number)
        number += 1
    used.update(found)
    return tuple(found)


def _is_prime(number: int) -> bool:
    if number < 4 or number % 2 == 0:
        return number in (2, 3)
    return all(number % part for part in range(3, int(number**0.5) + 1, 2))
