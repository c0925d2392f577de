"""Qwen3 (Qwen Team 2025): Llama with normed queries and keys."""

from services.engine.compute.models.decoder import Decoder


class Qwen3Model(Decoder):
    """Queries and keys are normed per head before they are rotated."""

    head_norms = True
