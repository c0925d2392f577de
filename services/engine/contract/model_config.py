"""`ModelConfig`: the shape of a model, read from config.json or GGUF metadata and checked."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from services.engine.contract.deepseek_v4 import DeepseekV4Config
    from services.engine.contract.deepseek_v41 import DeepseekV41Config


class ModelFileError(ValueError):
    """A model's files cannot be read or served; the message names the file and the problem."""


@dataclass(frozen=True, slots=True)
class LinearRope:
    """All rotary frequencies are divided by one factor (Chen et al. 2023)."""

    factor: float


@dataclass(frozen=True, slots=True)
class Llama3Rope:
    """Llama 3's long-context scaling of the rotary frequencies."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int


@dataclass(frozen=True, slots=True)
class YarnRope:
    """YaRN (Peng et al. 2023): fast pairs are kept, slow pairs scaled, with a ramp in between."""

    factor: float
    original_max_position: int
    beta_fast: float = 32.0
    """Pairs with at least this many rotations within the original length are kept."""
    beta_slow: float = 1.0
    """Pairs with at most this many rotations are scaled in full."""
    attention_factor: float = 1.0
    """Multiplies cosine and sine, and so each attention score by its square."""
    truncate: bool = True
    """Whether the ramp begins and ends at whole pairs."""


@dataclass(frozen=True, slots=True)
class FactorsRope:
    """One divisor per pair's frequency: GGUF's `rope_freqs.weight`, LongRoPE's `short_factor`."""

    factors: tuple[float, ...]
    attention_factor: float = 1.0
    """As YarnRope's."""


RopeScaling = LinearRope | Llama3Rope | YarnRope | FactorsRope


@dataclass(frozen=True, slots=True)
class MoeConfig:
    """The experts of a model: the same number and size in every layer that has experts."""

    num_experts: int
    top_k: int
    """Experts per row."""
    intermediate_size: int
    """Size of one expert."""
    norm_topk_prob: bool
    """Whether the weights of the chosen experts are scaled to a sum of 1."""
    layers: tuple[int, ...]
    """Indices of the layers with experts, ascending; the others are dense."""
    scale: float = 1.0
    """Multiplies the weights of the chosen experts."""
    groups: int = 1
    """Groups of adjacent experts, of equal size."""
    top_groups: int = 1
    """Groups from which the experts of a row are chosen."""
    num_shared: int = 0
    """Experts that every row passes, as one network of their sizes together."""

    def __post_init__(self) -> None:
        if not 1 <= self.top_k <= self.num_experts:
            raise ModelFileError(
                f"top_k is {self.top_k}, it must be 1 to {self.num_experts}, the number of experts"
            )
        size = self.num_experts // max(1, self.groups)
        if self.groups < 1 or size * self.groups != self.num_experts or size < 2 <= self.groups:
            raise ModelFileError(
                f"groups is {self.groups}: {self.num_experts} experts do not make as many groups "
                "of 2 or more"
            )
        if not 1 <= self.top_groups <= self.groups or self.top_k > size * self.top_groups:
            raise ModelFileError(
                f"top_groups is {self.top_groups}, it must be 1 to {self.groups}, the number of "
                f"groups, and hold top_k ({self.top_k}) experts"
            )
        if not self.layers:
            raise ModelFileError("no layer has experts: model_type should name a dense model")


@dataclass(frozen=True, slots=True)
class IndexConfig:
    """The indexer that chooses the positions that a row attends to (DeepSeek-V3.2)."""

    heads: int
    dim: int
    """Size of an index head; its leading elements, as many as MlaConfig.rope_dim, are rotated."""
    top_k: int
    """Positions that a row attends to, at most."""


@dataclass(frozen=True, slots=True)
class MlaConfig:
    """Latent attention (DeepSeek-V2): keys and values of all heads from one vector per position."""

    q_rank: int | None
    """Size of the queries' latent; None for queries projected at once."""
    kv_rank: int
    """Size of the latent that the cache keeps."""
    nope_dim: int
    """Elements of a query or key head that are not rotated."""
    rope_dim: int
    """Those that are; the rotated part of a key is shared by all heads."""
    value_dim: int
    scale: float
    """Multiplies attention scores."""
    index: IndexConfig | None = None

    def __post_init__(self) -> None:
        index = self.index
        if index is not None and self.q_rank is None:
            raise ModelFileError("q_lora_rank is missing: the indexer reads the queries' latent")
        if index is not None and index.dim < self.rope_dim:
            raise ModelFileError(
                f"index_head_dim is {index.dim}, it must be at least {self.rope_dim} "
                "(qk_rope_head_dim)"
            )


_COUNTS = (
    "vocab_size",
    "hidden_size",
    "num_layers",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "intermediate_size",
    "max_position",
)


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder. Sizes are numbers of elements.

    Raises:
        ModelFileError: the sizes do not fit together.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    rope_theta: float
    max_position: int
    tie_embeddings: bool
    rope_scaling: RopeScaling | None = None
    moe: MoeConfig | None = None
    qkv_bias: bool = False
    output_bias: bool = False
    """Bias of the attention's output projection."""
    mlp_bias: bool = False
    head_norms: bool = False
    """Queries and keys are normed per head before they are rotated."""
    query_scale: float | None = None
    """Multiplies each attention score; None: 1 / sqrt(head_dim)."""
    rotary_dim: int = 0
    """Elements of a head that are rotated, the first ones; 0: all."""
    sliding_rope_theta: float | None = None
    """Base of the frequencies in layers with the window, which are then not scaled; None: as in the
    other layers."""
    sliding_window: int = 0
    """Positions that a row of a sliding layer attends to, itself included; 0 if none slides."""
    sliding_layers: tuple[int, ...] = ()
    """Indices of the layers with the sliding window, ascending."""
    mla: MlaConfig | None = None
    """Latent attention; `head_dim` is then the rotated part of a head."""
    mtp_layers: int = 0
    """Layers that draft tokens, as the configuration announces them; not among `num_layers`."""
    v4: "DeepseekV4Config | DeepseekV41Config | None" = None
    """All sizes of a DeepSeek V4 or V4.1; other fields here repeat those that every model has."""

    def __post_init__(self) -> None:
        for name in _COUNTS:
            if getattr(self, name) < 1:
                raise ModelFileError(f"{name} is {getattr(self, name)}, it must be at least 1")
        if self.num_heads % self.num_kv_heads:
            raise ModelFileError(
                f"num_heads is {self.num_heads}, it must be a multiple of num_kv_heads "
                f"({self.num_kv_heads})"
            )
        if self.head_dim % 2:
            raise ModelFileError(
                f"head_dim is {self.head_dim}, it must be even for rotary embeddings"
            )
        if self.rotary_dim % 2 or self.rotary_dim > self.head_dim:
            raise ModelFileError(
                f"rotary_dim is {self.rotary_dim}, it must be even and at most head_dim "
                f"({self.head_dim})"
            )
        if self.sliding_layers and self.sliding_window < 1:
            raise ModelFileError(
                f"sliding_window is {self.sliding_window}, it must be at least 1 because "
                f"{len(self.sliding_layers)} layers use it"
            )
