"""DeepSeek-V3 (DeepSeek-AI 2024) and V3.2 (DeepSeek-AI 2025): latent attention, grouped experts."""

from services.engine.compute.models.architecture import Architecture, Latent
from services.engine.compute.models.architectures.glm4_moe import GLM4_MOE

DEEPSEEK = Architecture(attention=Latent(), drafts=True, experts=GLM4_MOE.experts)
