"""Shape of a model, as read from config.json or GGUF metadata; checked once, frozen."""

from dataclasses import dataclass


class ModelFileError(ValueError):
    """Files of a model that cannot be read or served; the message says what is wrong with which."""


@dataclass(frozen=True, slots=True)
class LinearRope:
    """All rotary frequencies divided by one factor (Chen et al. 2023)."""

    factor: float


@dataclass(frozen=True, slots=True)
class Llama3Rope:
    """Llama 3's long-context stretch of the rotary frequencies."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int


@dataclass(frozen=True, slots=True)
class YarnRope:
    """YaRN (Peng et al. 2023): fast pairs kept, slow ones stretched, a ramp between."""

    factor: float
    original_max_position: int
    beta_fast: float = 32.0
    """Turns within the original length from which a pair is kept."""
    beta_slow: float = 1.0
    """Turns up to which a pair is stretched in full."""
    attention_factor: float = 1.0
    """Multiplies cosine and sine, and with them each score by its square."""
    truncate: bool = True
    """The ramp begins and ends at whole pairs."""


@dataclass(frozen=True, slots=True)
class FactorsRope:
    """A divisor for each pair's frequency, as GGUF files carry it (`rope_freqs.weight`)."""

    factors: tuple[float, ...]


RopeScaling = LinearRope | Llama3Rope | YarnRope | FactorsRope


@dataclass(frozen=True, slots=True)
class MoeConfig:
    """Experts of a model: the same number and size in every layer that has any."""

    num_experts: int
    top_k: int
    """Experts that each row is sent to."""
    intermediate_size: int
    """Of one expert."""
    norm_topk_prob: bool
    """The chosen experts' weights are scaled to a sum of 1."""
    layers: tuple[int, ...]
    """Indices of the layers with experts, ascending; the others are dense."""

    def __post_init__(self) -> None:
        if not 1 <= self.top_k <= self.num_experts:
            raise ModelFileError(f"{self.top_k} of {self.num_experts} experts cannot be chosen")
        if not self.layers:
            raise ModelFileError("no layer has experts: model_type should be a dense one")


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
    """A decoder of the Llama family. Sizes are counts of elements."""

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
    """Of the attention's output."""
    mlp_bias: bool = False
    sliding_window: int = 0
    """Positions that a row of a sliding layer sees, itself included; 0: no layer slides."""
    sliding_layers: tuple[int, ...] = ()
    """Indices of the layers whose rows see the window alone, ascending."""

    def __post_init__(self) -> None:
        for name in _COUNTS:
            if getattr(self, name) < 1:
                raise ModelFileError(f"{name} is {getattr(self, name)}, it must be at least 1")
        if self.num_heads % self.num_kv_heads:
            raise ModelFileError(
                f"{self.num_heads} query heads cannot share {self.num_kv_heads} key heads evenly"
            )
        if self.head_dim % 2:
            raise ModelFileError(f"head size {self.head_dim} is odd: it cannot be rotated")
        if self.sliding_layers and self.sliding_window < 1:
            raise ModelFileError(f"sliding_window is {self.sliding_window}, but layers use it")

    @property
    def group_size(self) -> int:
        """Query heads that share one key and value head."""
        return self.num_heads // self.num_kv_heads
