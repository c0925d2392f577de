"""Keys of the sampling noise: a hash of (seed, choice, absolute position, purpose) only.

There is no generator state, so a token's noise does not depend on the rest of the batch, on earlier
tokens, or on the engine. Only integers are used, so every machine computes the same keys.
`kernels.interface.Kernels.sample` turns a key into noise for each token id.
"""

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15

SAMPLE = 1
"""Purpose: sample the next token."""


def row_key(seed: int, choice: int, position: int, purpose: int = SAMPLE) -> tuple[int, int]:
    """The key of a row, as two signed 32-bit words."""
    state = 0
    for part in (seed, choice, position, purpose):
        state = _mix((state ^ part) + _GOLDEN & _MASK)
    return _signed(state >> 32), _signed(state & 0xFFFFFFFF)


def _mix(value: int) -> int:
    """The finaliser of SplitMix64 (Steele, Lea and Flood 2014)."""
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    value = (value ^ value >> 27) * 0x94D049BB133111EB & _MASK
    return value ^ value >> 31


def _signed(word: int) -> int:
    return word - (1 << 32) if word >= 1 << 31 else word
