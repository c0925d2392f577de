"""Llama (Touvron et al. 2023), Mistral (Jiang et al. 2023) and Qwen2 (Qwen Team 2024): the decoder
as it stands. What sets them apart, biases and windows, their configuration says."""

from services.engine.compute.models.decoder import Decoder


class LlamaModel(Decoder):
    """Grouped-query attention without head norms, and a dense SwiGLU in every layer."""
