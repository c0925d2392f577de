"""Mixtral (Jiang et al. 2024): Mistral with experts in every layer."""

from services.engine.compute.models.architecture import Architecture, ExpertNames, Experts

MIXTRAL = Architecture(
    experts=Experts(
        router="block_sparse_moe.gate",
        experts=ExpertNames(
            gate="block_sparse_moe.experts.{}.w1",
            up="block_sparse_moe.experts.{}.w3",
            down="block_sparse_moe.experts.{}.w2",
        ),
    )
)
