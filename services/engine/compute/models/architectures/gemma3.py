"""The text part of Gemma 3 (Gemma Team 2025): a norm before and after each half of a layer."""

from kernels.interface import Gate
from services.engine.compute.models.architecture import Architecture, Dense, GroupedQuery

GEMMA3 = Architecture(
    attention=GroupedQuery(post_norm="post_attention_layernorm"),
    dense=Dense(
        norm="pre_feedforward_layernorm",
        gate=Gate("gelu_tanh"),
        post_norm="post_feedforward_layernorm",
    ),
    norm_offset=1.0,
    scales_embedding=True,
)
