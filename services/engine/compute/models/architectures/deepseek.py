"""DeepSeek-V3 (DeepSeek-AI 2024) and V3.2 (DeepSeek-AI 2025): latent attention, grouped experts.

And the routed experts of V4 and V4.1: the rest of these is not made of a declaration, but by
`v4_modules` and `v41_modules`.
"""

from dataclasses import replace

from services.engine.compute.models.architecture import (
    Architecture,
    ExpertNames,
    Experts,
    Latent,
    Mtp,
)
from services.engine.compute.models.architectures.glm4_moe import GLM4_MOE

V4_EXPERTS = ExpertNames(
    layers="layers",
    gate="ffn.experts.{}.w1",
    up="ffn.experts.{}.w3",
    down="ffn.experts.{}.w2",
)
V4_DRAFT_EXPERTS = replace(V4_EXPERTS, layers="mtp")
DEEPSEEK_V4 = Architecture(
    experts=Experts(router="ffn.gate", scoring="sqrt_softplus", experts=V4_EXPERTS)
)
DEEPSEEK = Architecture(attention=Latent(), mtp=Mtp(), experts=GLM4_MOE.experts)
