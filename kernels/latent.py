"""The interface of what a kernel set offers for attention over latent vectors (MLA).

The cache holds one vector per position for all heads: its first R elements are the compressed key
and value (the latent), the rest is the rotated part of the key. Queries are projected into the same
space ("absorbed"), so no key or value of a head is ever built. Source: DeepSeek-AI 2024
(DeepSeek-V2), section 2.1 and appendix C.

Letters in shapes are those of `kernels.interface`; R is the latent's size and W = R + rotated part.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

if TYPE_CHECKING:
    from kernels.interface import AttentionGroup
    from kernels.ragged import RaggedLatentAttention


class HeadLinear(Protocol):
    """A weight per head [H, out, in] with its products."""

    def __call__(self, x: Tensor) -> Tensor:
        """Return each head of x [T, H, in] times its transposed weight: [T, H, out]."""

    @property
    def nbytes(self) -> int:
        """Memory of the packed weights, in bytes."""


@dataclass(frozen=True, slots=True)
class IndexQuery:
    """What an indexer scores the positions of a group with (DeepSeek-V3.2)."""

    queries: Tensor
    """[T, index heads, index size]."""
    weights: Tensor
    """[T, index heads] float32: what each head's score counts, all scales included."""
    cache: Tensor
    """[blocks, block size, index size]: the index keys of all positions."""
    top_k: int
    """Positions that a row attends to, at most."""

    def of_rows(self, rows: slice) -> "IndexQuery":
        """The same for some of the rows."""
        return replace(self, queries=self.queries[rows], weights=self.weights[rows])


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentKernels:
    """The operations of latent attention."""

    pack_heads: Callable[[Tensor], HeadLinear]
    """weight [H, out, in] -> a `HeadLinear` in the layout that the set's product reads."""
    attention: "Callable[[Tensor, Tensor, AttentionGroup, int, float, IndexQuery | None], Tensor]"
    """(q [T, H, W], cache [blocks, block size, W], group, R, scale, index) -> [T, H, R]:
    softmax(scale * q c^T) c[:R], where c are the positions up to the row's own.

    T counts the rows of the group only. With `index`, a row attends to the `top_k` positions of the
    highest sum over index heads of weight * ReLU(query . key); the earlier position wins a tie.
    Cache and index keys hold the group's own rows already."""
    layer_norm: Callable[[Tensor, Tensor, Tensor, float], Tensor]
    """(x [T, N], weight [N], bias [N], eps) -> [T, N]: (x - mean) / sqrt(variance + eps) * weight +
    bias. Source: Ba et al. 2016, equation 4."""
    ragged: "RaggedLatentAttention | None" = None
    """`attention` of all sequences of a round in one call. None: the caller forms groups."""
