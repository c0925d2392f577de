"""The interface of a kernel set: its operations, their shapes, and the records that they take.

A set is a module with a constant `KERNELS: Kernels`. `kernels.dispatch` chooses a set and loads it
by name. This module imports no set, so models and sets can both import it.

Letters in shapes: T rows (token positions) of a round, H query heads, G key/value heads, D head
size, N hidden size, F intermediate size, V vocabulary, E experts, k experts chosen per row.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

from torch import Tensor

from kernels.expert_products import ExpertKernels
from kernels.latent import LatentKernels
from kernels.ragged import RaggedAttention
from kernels.round_rows import MakeRoundRows
from kernels.whole_rounds import WholeRounds


class UnsupportedError(ValueError):
    """No kernel set supports the request on this machine; the message names the option."""


class Linear(Protocol):
    """A packed weight [out, in] with its matrix product."""

    def __call__(self, x: Tensor) -> Tensor:
        """Return x [T, in] times the transposed weight: [T, out]."""

    def add_to(self, residual: Tensor, x: Tensor) -> None:
        """Add x [T, in] times the transposed weight to residual [T, out], in place."""

    @property
    def nbytes(self) -> int:
        """Memory of the packed weight, in bytes."""


@dataclass(frozen=True, slots=True)
class KeptRows:
    """Contiguous copies of the keys and values of decoding sequences.

    With them, decode attention needs no gather from blocks. The blocks remain the primary copy.
    Row i of a store belongs to the i-th sequence of the attention group.
    """

    stores: Mapping[int, Tensor]
    """Store of each layer, by the address (`data_ptr`) of the layer's cache: [2, rows, G,
    capacity, D]; index 0 of the first axis holds keys, index 1 values."""
    slots: Tensor
    """[sequences * 2 G] int64: where this round's keys and values go, as row indices into a store
    viewed as [2 * rows * G * capacity, D]."""
    joined: tuple[tuple[int, Tensor, int], ...]
    """Rows to copy from blocks before the round: (row, block ids [blocks] int64, positions)."""


@dataclass(frozen=True, slots=True)
class AttentionGroup:
    """Sequences whose attention one call computes; their rows are contiguous.

    A group of decodes has one row per sequence. A prefill is a group of one sequence.
    """

    rows: slice
    """The group's rows among the T rows of the round."""
    starts: tuple[int, ...]
    """Per sequence: positions computed in earlier rounds."""
    block_tables: Tensor
    """[sequences, blocks] int64, padded with block 0."""
    mask: Tensor | None
    """Added to the scores before the softmax (0 or -inf), broadcast over heads. None if no position
    is masked, or if `causal` describes the mask. `sink_attention` reads that of decodes only and
    latent attention none: prefills of such models have none, because its size has no bound."""
    causal: bool
    """Plain causal attention among the group's own rows: there is no history (start is 0)."""
    lengths: Tensor | None = None
    """Decodes only: [sequences] int32, positions that each sequence's row attends to."""
    window: int = 0
    """Sliding window in positions, the row's own included; 0 for full attention. `mask` already
    applies it."""
    kept: KeptRows | None = None
    """Decodes only, for sets with `uses_kept_rows`. `mask` is then as wide as the longest
    history."""


@dataclass(frozen=True, slots=True)
class Gate:
    """How the gate of a feed-forward network opens: f(gate) * (up + up_offset)."""

    function: Literal["silu", "gelu_tanh"] = "silu"
    """f: gate * sigmoid(alpha * gate), or GELU in its tanh form."""
    alpha: float = 1.0
    limit: float | None = None
    """Before f the gate is at most `limit`, and up is within -limit and limit; None: neither."""
    up_offset: float = 0.0


Scoring = Literal["softmax", "sigmoid", "sqrt_softplus"]


@dataclass(frozen=True, slots=True)
class Routing:
    """How the scores of a row become its experts and their weights.

    Raises:
        ValueError: the numbers do not fit together.
    """

    top_k: int
    """Experts per row."""
    scoring: Scoring = "softmax"
    """Function of a score before the choice: softmax over all experts, sigmoid, or
    sqrt(log(1 + exp(score)))."""
    renormalise: bool = True
    """Whether the weights of the chosen experts are scaled to a sum of 1."""
    scale: float = 1.0
    """Multiplies the weights at the end."""
    groups: int = 1
    """Groups of adjacent experts of equal size. A group's score is the sum of its two best."""
    top_groups: int = 1
    """Groups from which a row's experts are chosen; the best ones."""

    def __post_init__(self) -> None:
        if not 1 <= self.top_groups <= self.groups:
            raise ValueError(
                f"top_groups is {self.top_groups}, it must be 1 to {self.groups}, the number of "
                "groups"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """A kernel set: one function per operation. Letters in shapes: see the module's docstring."""

    name: str
    """Part of `numerics_id`. Two sets of the same name sum in the same order."""
    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    """(x [T, N], weight [N], eps) -> [T, N]: x / sqrt(mean(x^2) + eps) * weight.

    The result has the format of x. A weight in float32 multiplies before the result is rounded to
    it. Source: Zhang and Sennrich 2019, equation 4."""
    rope: Callable[[Tensor, Tensor], None]
    """(qk [T, H + G, D], cos_sin [T, D / 2, 2]): rotate in place.

    Elements (2i, 2i + 1) form a pair; `cos_sin` holds cosine and sine of the pair's angle. Source:
    Su et al. 2021, equation 34."""
    kv_write: Callable[[Tensor, Tensor, Tensor], None]
    """(cache [blocks, block_size, 2 G, D], kv [T, 2 G, D], slots [T] int64): store keys and values.

    slot = block * block_size + offset in the block."""
    attention: Callable[[Tensor, Tensor, Tensor, AttentionGroup], Tensor]
    """(q [T, H, D], kv [T, 2 G, D], cache, group) -> [T, H * D]: softmax(q k^T / sqrt(D)) v.

    T counts the rows of the group only. `kv_write` has stored their keys and values before."""
    sink_attention: Callable[[Tensor, Tensor, Tensor, AttentionGroup, Tensor], Tensor]
    """(q, kv, cache, group, sinks [H]) -> [T, H * D]: as `attention`, but a head's sink joins the
    scores of its softmax, and adds no value."""
    silu_mul: Callable[[Tensor], Tensor]
    """gate_up [T, 2 F] -> [T, F]: silu(gate) * up; the gate is the first half. May overwrite the
    gate. Source: Shazeer 2020 (SwiGLU)."""
    gate_mul: Callable[[Tensor, Gate], Tensor]
    """(gate_up [T, 2 F], gate) -> [T, F]: for gates other than `silu_mul`'s."""
    sample: Callable[[Tensor, Tensor], Tensor]
    """(scores [R, V] float32, keys [R, 2] int32) -> [R] int64: one draw from softmax(scores) per
    row.

    The result is the arg-max of score plus Gumbel noise. The noise is a hash of the row's key and
    the token id."""
    arg_max: Callable[[Tensor], Tensor]
    """scores [R, V] -> [R] int64: the lowest id of the highest score; the first NaN if there is
    one."""
    pack: Callable[[Tensor], Linear]
    """weight [out, in] -> a `Linear` in the layout that the set's product reads."""
    row_parallel: Callable[[Linear], Linear] = lambda linear: linear
    """Wraps a product whose inputs are split over ranks, so that its result is summed over them.

    The identity where one rank holds the whole model."""
    route: Callable[[Tensor, Routing, Tensor | None, Tensor | None], tuple[Tensor, Tensor]]
    """(scores [T, E], routing, bias [E] float32 or None, chosen [T, k] int64 or None) -> weights
    [T, k] float32, experts [T, k] int64.

    The k best experts, best first. `bias` is added for the choice of groups and experts only; the
    weights are those without it. With `chosen` the experts are given (hash routing) and only
    weighted. Sources: Shazeer et al. 2017, equations 3 to 5 (softmax); DeepSeek-AI 2024
    (DeepSeek-V3), equations 12 to 16 and section 2.1.2 (sigmoid, bias, groups)."""
    combine: Callable[[Tensor, Tensor], Tensor]
    """(outputs [T, k, N], weights [T, k] float32) -> [T, N]: weighted sum over k, in float32 and in
    the order of the columns."""
    latent: LatentKernels | None = None
    """Attention over latent vectors (MLA). None: the set does not serve such models."""
    ragged: RaggedAttention | None = None
    """Attention of all sequences of a round in one call. None: the caller forms groups."""
    round_rows: MakeRoundRows | None = None
    """Token ids, positions and slots of a round, made on the device. With it and `ragged`, rounds
    are run without a wait of the host."""
    uses_kept_rows: bool = False
    """Decode attention reads `AttentionGroup.kept` where it is given."""
    experts: ExpertKernels | None = None
    """All experts of a layer in one call. None: they run one after another."""
    place_heads: (
        Callable[[Tensor, tuple[Tensor, Tensor] | None, float, Tensor, Tensor, Tensor], None] | None
    ) = None
    """(qkv [T, H + 2 G, D], norms of queries and keys [D] each or None, eps, cos_sin [T, D / 2, 2],
    cache, slots): `rms_norm` and `rope` of queries and keys in place, then `kv_write`. None: the
    caller does these one after another."""
    whole_rounds: Callable[[], WholeRounds] | None = None
    """Makes what runs a dense decoder's whole round as one job, for one model.

    None: the model calls the operations above layer by layer. A set with `whole_rounds` uses its
    own operations for drawing tokens only."""
