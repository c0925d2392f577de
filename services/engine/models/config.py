"""Shape of a model, as read from config.json or GGUF metadata; checked once, frozen."""

from dataclasses import dataclass


class ModelFileError(ValueError):
    """Files of a model that cannot be read or served; the message says what is wrong with which."""


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """Llama 3's long-context stretch of the rotary frequencies."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int


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

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ModelFileError(
                f"{self.num_heads} query heads cannot share {self.num_kv_heads} key heads evenly"
            )
        if self.head_dim % 2:
            raise ModelFileError(f"head size {self.head_dim} is odd: it cannot be rotated")

    @property
    def group_size(self) -> int:
        """Query heads that share one key and value head."""
        return self.num_heads // self.num_kv_heads
