"""`DeepseekV4Config`: the shape of a DeepSeek V4 model, read from config.json and checked.

`DeepseekSizes` is what it shares with V4.1 (`deepseek_v41.py`).
"""

from dataclasses import dataclass
from typing import Literal

from services.engine.contract.model_config import ModelFileError, YarnRope

LayerKind = Literal["window", "indexed", "dense"]
"""What a row attends to beside its window: nothing; the compressed entries that an indexer chooses
(CSA); or all compressed entries (HCA)."""


@dataclass(frozen=True, slots=True)
class V4Layer:
    """What one layer is made of."""

    kind: LayerKind = "window"
    ratio: int = 0
    """Positions that one compressed entry stands for; 0 for a layer of kind "window"."""
    hashed: bool = False
    """Experts are chosen by a table of token ids, not by the router's scores."""

    def __post_init__(self) -> None:
        if (self.ratio > 1) != (self.kind != "window"):
            raise ModelFileError(
                f"ratio is {self.ratio} in a layer of kind {self.kind!r}: compressed layers need "
                "at least 2 positions per entry, window layers 0"
            )

    @property
    def span(self) -> int:
        """Positions whose rows make one entry; entries of an indexed layer overlap by half."""
        return 2 * self.ratio if self.kind == "indexed" else self.ratio


_COUNTS = (
    "vocab_size",
    "hidden_size",
    "num_heads",
    "head_dim",
    "rope_dim",
    "query_rank",
    "output_groups",
    "output_rank",
    "window",
    "index_heads",
    "index_dim",
    "index_top_k",
    "num_experts",
    "top_k",
    "expert_size",
    "streams",
    "sinkhorn_steps",
    "max_position",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepseekSizes:
    """What V4 and V4.1 have in common. Sizes are numbers of elements.

    Raises:
        ModelFileError: the sizes do not fit together.
    """

    vocab_size: int
    hidden_size: int
    num_heads: int
    head_dim: int
    rope_dim: int
    """Trailing elements of a head that are rotated; also of index keys."""
    query_rank: int
    """Width of the low-rank query, which the indexer reads too."""
    output_groups: int
    """Groups of heads that the first half of the output projection keeps apart."""
    output_rank: int
    """Width of one group between the two halves of the output projection."""
    window: int
    """Latest positions that every row attends to, itself included."""
    index_heads: int
    index_dim: int
    index_top_k: int
    """Compressed entries that an indexed layer attends to, at most."""
    num_experts: int
    top_k: int
    """Experts per row."""
    expert_size: int
    """Intermediate size of one expert, and of the shared one."""
    routed_scale: float
    """Multiplies the weights of the chosen experts."""
    swiglu_limit: float
    """Upper bound of an expert's gate, and bound of its `up` on both sides, before SwiGLU."""
    streams: int
    """Residual streams of the hyper-connections."""
    sinkhorn_steps: int
    """Normalisations of columns in the hyper-connections; one fewer of rows."""
    hyper_eps: float
    rms_norm_eps: float
    rope_theta: float
    """Base of the angles in layers of kind "window"."""
    compress_rope_theta: float
    """Base of all angles in the other layers."""
    compress_rope: YarnRope | None
    """Scaling of those angles; its `attention_factor` must be 1."""
    max_position: int
    mtp_layers: int = 0
    """Layers for multi-token prediction in the files; they are not part of the forward."""

    def __post_init__(self) -> None:
        for name in _COUNTS:
            if getattr(self, name) < 1:
                raise ModelFileError(f"{name} is {getattr(self, name)}, it must be at least 1")
        self._check_heads()
        if self.top_k > self.num_experts:
            raise ModelFileError(
                f"top_k is {self.top_k}, it must be 1 to {self.num_experts}, the number of experts"
            )
        for name in ("rms_norm_eps", "hyper_eps", "swiglu_limit", "routed_scale"):
            if not getattr(self, name) > 0:
                raise ModelFileError(f"{name} is {getattr(self, name)}, it must be above 0")
        if self.compress_rope and self.compress_rope.attention_factor != 1:
            raise ModelFileError(
                f"attention_factor is {self.compress_rope.attention_factor}: DeepSeek V4 scales "
                "frequencies only, so it must be 1"
            )

    def _check_heads(self) -> None:
        narrowest = min(self.head_dim, self.index_dim)
        if self.rope_dim % 2 or self.rope_dim > narrowest:
            raise ModelFileError(
                f"rope_dim is {self.rope_dim}, it must be even and at most {narrowest}, the "
                "smaller of head_dim and index_dim"
            )
        if self.num_heads % self.output_groups:
            raise ModelFileError(
                f"num_heads is {self.num_heads}, it must be a multiple of output_groups "
                f"({self.output_groups})"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepseekV4Config(DeepseekSizes):
    """Of DeepSeek V4.

    Raises:
        ModelFileError: the sizes do not fit together.
    """

    layers: tuple[V4Layer, ...]

    def __post_init__(self) -> None:
        DeepseekSizes.__post_init__(self)  # super() does not work in a class with slots
        if not self.layers:
            raise ModelFileError("layers is empty: a model has at least one layer")
