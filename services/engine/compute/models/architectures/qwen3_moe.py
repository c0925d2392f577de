"""Qwen3 with experts (Qwen Team 2025): softmax router, no shared expert."""

from services.engine.compute.models.architecture import Architecture, Experts

QWEN3_MOE = Architecture(experts=Experts())
