"""What a set of kernels offers and what its operations take; imports no set.

A set is a module with a constant `KERNELS`; `kernels.dispatch` chooses one and loads it by name.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor


class UnsupportedError(ValueError):
    """No set of kernels does that."""


class Linear(Protocol):
    """A weight in the form that its product wants."""

    def __call__(self, x: Tensor) -> Tensor:
        """x [rows, in] times the weight: [rows, out]."""

    def add_to(self, residual: Tensor, x: Tensor) -> None:
        """residual [rows, out] += x [rows, in] times the weight."""

    @property
    def nbytes(self) -> int:
        """Bytes of the packed weight."""


@dataclass(frozen=True, slots=True)
class KeptRows:
    """Keys and values of decoding sequences side by side, so that no round has to gather them.

    Copies: they lie in the cache's blocks too. Row i belongs to the i-th sequence of its group.
    """

    stores: Mapping[int, Tensor]
    """By address of a layer's cache: [2, rows, G, capacity, D], keys and values."""
    slots: Tensor
    """[sequences * 2 G] int64: rows of D in a store where the round's own keys and values go."""
    joined: tuple[tuple[int, Tensor, int], ...]
    """Row, block table and number of positions to copy from blocks first."""


@dataclass(frozen=True, slots=True)
class AttentionGroup:
    """Sequences of one round that attend in one call: rows follow one another, one part each.

    A group of decodes has one row a sequence; a prefill is a group of its own.
    """

    rows: slice
    """Their rows among all positions of the round."""
    starts: tuple[int, ...]
    """Per sequence, positions that were computed before."""
    block_tables: Tensor
    """[sequences, blocks] int64, padded with block 0."""
    mask: Tensor | None
    """What to add to the scores, broadcast over heads; None if nothing is hidden, or `causal`."""
    causal: bool
    """The rows are all there is to attend to: start is 0."""
    lengths: Tensor | None = None
    """[sequences] int32: positions that each sequence's last row attends to; of decodes only."""
    window: int = 0
    """Positions that a row sees, itself included; 0: all before it. `mask` says it too."""
    kept: KeptRows | None = None
    """Of decodes only, for sets that keep rows; `mask` is then as wide as the longest history."""


@dataclass(frozen=True, slots=True)
class Kernels:
    """A set of operations. T rows, H query heads, G key and value heads, D head size."""

    name: str
    """Part of numerics_id: equal names, equal order of every sum."""
    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    """(x [T, N], weight [N], eps) -> [T, N]; Zhang and Sennrich 2019."""
    rope: Callable[[Tensor, Tensor], None]
    """(qk [T, H + G, D], turns [T, D / 2, 2]) rotates in place; Su et al. 2021.

    Neighbours (2i, 2i + 1) form a pair; `turns` holds cosine and sine of the pair's angle.
    """
    kv_write: Callable[[Tensor, Tensor, Tensor], None]
    """(cache [blocks, block, 2 G, D], kv [T, 2 G, D], slots [T]): slot = block * size + offset."""
    attention: Callable[[Tensor, Tensor, Tensor, AttentionGroup], Tensor]
    """(q [T, H, D], kv [T, 2 G, D], cache, group) -> [T, H * D]; rows of the group alone."""
    silu_mul: Callable[[Tensor], Tensor]
    """gate_up [T, 2 F] -> silu(gate) * up, [T, F]; Shazeer 2020."""
    sample: Callable[[Tensor, Tensor], Tensor]
    """(scores [R, V] float32, keys [R, 2] int32) -> [R] int64: the arg-max of score plus Gumbel
    noise, which is a draw from softmax(scores). Noise is a hash of key and token id."""
    pack: Callable[[Tensor], Linear]
    """A weight [out, in] made ready once."""
    route: Callable[[Tensor, int, bool], tuple[Tensor, Tensor]]
    """(scores [T, E], k, renormalise) -> weights [T, k] float32, experts [T, k] int64: the k
    likeliest of softmax(scores), best first; renormalised weights add up to 1."""
    spread: Callable[[Linear], Linear] = field(kw_only=True, default=lambda linear: linear)
    """A product whose inputs may be spread over ranks; here they are not."""
    combine: Callable[[Tensor, Tensor], Tensor]
    """(outputs [T, k, N], weights [T, k] float32) -> [T, N]: the weighted sum, in float32 and in
    the order of the columns."""
    keeps_rows: bool = False
    """Attention of decodes reads `AttentionGroup.kept` where it is given."""


@dataclass(frozen=True, slots=True)
class Spans:
    """Which rows of a round belong to which sequence; all int64."""

    seqs: Tensor
    """[sequences, 3]: first row, rows, positions that were computed before."""
    tables: Tensor
    """[sequences, blocks]."""
