"""Experts of DeepSeek-V3 and GLM 4.5: chosen from the best groups, beside shared ones."""

from collections.abc import Iterator

from services.engine.tiny_models.declaration import Config, Kind, TinyTensor
from services.engine.tiny_models.declarations import decoder

EXPERTS = {
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
}


def feed_forward(config: Config, index: int, at: str) -> Iterator[TinyTensor]:
    """The feed-forward part of a layer: dense in the first layers, else router and experts."""
    hidden, experts = config["hidden_size"], config["n_routed_experts"]
    if index < config["first_k_dense_replace"]:
        yield from decoder.gated(f"{at}.mlp", hidden, config["intermediate_size"])
        return
    yield TinyTensor(f"{at}.mlp.gate.weight", (experts, hidden), Kind.PLAIN)
    name = f"{at}.mlp.gate.e_score_correction_bias"
    yield TinyTensor(name, (experts,), Kind.BIAS, float32=True)
    middle = config["moe_intermediate_size"]
    for expert in range(experts):
        yield from decoder.gated(f"{at}.mlp.experts.{expert}", hidden, middle)
    shared = middle * config["n_shared_experts"]
    yield from decoder.gated(f"{at}.mlp.shared_experts", hidden, shared)


def check_groups(config: Config) -> None:
    """Check the keys of EXPERTS.

    Raises:
        ValueError: one is out of its range, or experts and groups do not fit one another.
    """
    names = ("moe_intermediate_size", "n_shared_experts", "n_group", "topk_group")
    decoder.check_sizes(config, *names)
    decoder.check_experts(config, "n_routed_experts")
    dense, layers = config["first_k_dense_replace"], config["num_hidden_layers"]
    if type(dense) is not int or not 0 <= dense <= layers:
        raise ValueError(f"first_k_dense_replace must be 0 to {layers}, got {dense!r}")
    experts, groups, best = (config[key] for key in ("n_routed_experts", "n_group", "topk_group"))
    # The score of a group is the sum of its two best experts.
    if experts % groups or (groups > 1 and experts // groups < 2):
        raise ValueError(f"n_group {groups} does not make groups of 2 of {experts} experts")
    if best > groups:
        raise ValueError(f"topk_group {best} is above n_group {groups}")
    chosen, available = config["num_experts_per_tok"], best * (experts // groups)
    if chosen > available:
        raise ValueError(
            f"num_experts_per_tok {chosen} is above the {available} experts of topk_group {best}"
        )
