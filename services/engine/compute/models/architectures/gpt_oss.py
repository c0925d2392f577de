"""gpt-oss (OpenAI 2025): attention sinks, experts with biases and a clamped gate."""

from kernels.interface import Gate
from services.engine.compute.models.architecture import (
    Architecture,
    Experts,
    GroupedQuery,
    StackedExperts,
)

GPT_OSS = Architecture(
    attention=GroupedQuery(sinks="self_attn.sinks"),
    experts=Experts(
        router="mlp.router",
        score_bias="mlp.router.bias",
        experts=StackedExperts(),
        gate=Gate(alpha=1.702, limit=7.0, up_offset=1.0),
    ),
)
