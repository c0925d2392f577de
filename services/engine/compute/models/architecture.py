"""What an architecture's layers are made of, and what its tensors are called.

An `Architecture` is a declaration: `decoder.Decoder` builds the layers from it. Sizes, and what
differs between models of one architecture, are in `ModelConfig`. Names of tensors are those of the
published files, relative to the layer (`model.layers.0`), without the ending `.weight`.
"""

from dataclasses import dataclass

from kernels.interface import Gate, Scoring

SWIGLU = Gate()


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupedQuery:
    """Attention in which groups of query heads share a key and a value head (Ainslie et al. 2023).

    Biases, head norms, windows and rotary embeddings are as `ModelConfig` says.
    """

    norm: str = "input_layernorm"
    projections: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    """Query, key and value; or one tensor with the rows of all three, in this order."""
    output: str = "self_attn.o_proj"
    head_norms: tuple[str, str] = ("self_attn.q_norm", "self_attn.k_norm")
    """Norms of queries and keys; read where `ModelConfig.head_norms` is set."""
    sinks: str | None = None
    """A learned score per head that joins the softmax and adds no value [H]; its whole name."""
    post_norm: str | None = None
    """Norm of the attention's output, before it joins the residual."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Latent:
    """Attention over one latent vector per position (MLA), with names of the published files.

    Sizes, and whether there is an indexer, are in `ModelConfig.mla`.
    """

    norm: str = "input_layernorm"
    part: str = "self_attn"
    """What the names of its tensors begin with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dense:
    """A gated feed-forward network: down(f(gate) * up)."""

    norm: str = "post_attention_layernorm"
    """The norm before it."""
    gate_up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    """Gate and up; or one tensor with the rows of both, in this order."""
    down: str = "mlp.down_proj"
    gate: Gate = SWIGLU
    post_norm: str | None = None
    """Norm of its output, before it joins the residual."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertNames:
    """Tensors of one expert each; `{}` is the expert's number."""

    layers: str = "model.layers"
    """What the names of layers begin with."""
    gate: str = "mlp.experts.{}.gate_proj"
    up: str = "mlp.experts.{}.up_proj"
    down: str = "mlp.experts.{}.down_proj"


@dataclass(frozen=True, slots=True, kw_only=True)
class StackedExperts:
    """One tensor for all experts of a layer, with inputs before outputs; whole names.

    Rows of gate and up alternate in `gate_up` [E, N, 2 F] and `gate_up_bias` [E, 2 F].
    """

    gate_up: str = "mlp.experts.gate_up_proj"
    gate_up_bias: str = "mlp.experts.gate_up_proj_bias"
    down: str = "mlp.experts.down_proj"
    """[E, F, N]."""
    down_bias: str = "mlp.experts.down_proj_bias"
    """[E, N]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """A router and its experts, in the layers that `MoeConfig.layers` lists."""

    router: str = "mlp.gate"
    scoring: Scoring = "softmax"
    score_bias: str | None = None
    """Added to the router's scores [E]; its whole name."""
    choice_bias: str | None = None
    """Added for the choice of experts only [E]; its whole name."""
    experts: ExpertNames | StackedExperts = ExpertNames()
    gate: Gate = SWIGLU
    shared: Dense | None = None
    """A network that every row passes; its size is that of `MoeConfig.num_shared` experts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mtp:
    """Layers after the last one, which draft tokens: one of the model's layers with more before it.

    Source: DeepSeek-AI 2024 (DeepSeek-V3), section 2.2.
    """

    embedding_norm: str = "enorm"
    hidden_norm: str = "hnorm"
    project: str = "eh_proj"
    """[N, 2 N]: the normed embedding of the next token, and the normed row of the last layer."""
    norm: str = "shared_head.norm"
    copies: tuple[str, ...] = ("embed_tokens", "shared_head.head")
    """Of the model's embedding and head; not read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """A decoder: what its layers are made of."""

    attention: GroupedQuery | Latent = GroupedQuery()
    dense: Dense = Dense()
    """The feed-forward network of layers without experts."""
    experts: Experts | None = None
    norm_offset: float = 0.0
    """Added to the weights of all norms; Gemma's are stored around 0."""
    mtp: Mtp | None = None
    """Layers that draft tokens; None: files may not hold layers beyond the last one."""
    scales_embedding: bool = False
    """Whether embeddings are multiplied by sqrt(hidden size)."""


PLAIN = Architecture()
"""Llama's layers: what most dense architectures are made of."""
