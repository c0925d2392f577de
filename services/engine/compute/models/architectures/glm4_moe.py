"""GLM 4.5 and 4.6 (GLM-4.5 Team 2025): DeepSeek V3's experts behind grouped-query attention."""

from services.engine.compute.models.architecture import Architecture, Dense, Experts, Mtp

GLM4_MOE = Architecture(
    mtp=Mtp(),
    experts=Experts(
        scoring="sigmoid",
        choice_bias="mlp.gate.e_score_correction_bias",
        shared=Dense(
            gate_up=("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj"),
            down="mlp.shared_experts.down_proj",
        ),
    ),
)
