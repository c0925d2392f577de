"""Llama (Touvron et al. 2023), Mistral (Jiang et al. 2023), Qwen2 and Qwen3 (Qwen Team 2024, 2025).

They differ in biases, windows and norms of heads, which the configuration gives.
"""

from services.engine.compute.models.architecture import PLAIN

LLAMA = PLAIN
