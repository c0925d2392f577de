"""Llama (Touvron et al. 2023), Mistral (Jiang et al. 2023) and Qwen2 (Qwen Team 2024).

They use the shared decoder as it is. They differ in biases and sliding windows, which the
configuration gives.
"""

from services.engine.compute.models.decoder import Decoder


class LlamaModel(Decoder):
    """Grouped-query attention without norms per head, and a dense SwiGLU in every layer."""
