"""Phi 3 (Abdin et al. 2024) and Phi 4: Llama with joined projections."""

from services.engine.compute.models.architecture import Architecture, Dense, GroupedQuery

PHI3 = Architecture(
    attention=GroupedQuery(projections=("self_attn.qkv_proj",)),
    dense=Dense(gate_up=("mlp.gate_up_proj",)),
)
