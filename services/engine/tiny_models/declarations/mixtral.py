"""Mixtral: the feed-forward part of every layer is a router and experts."""

from collections.abc import Iterator

from services.engine.tiny_models.declaration import Config, Declaration, Kind, TinyTensor
from services.engine.tiny_models.declarations import decoder


def _tensors(config: Config) -> Iterator[TinyTensor]:
    hidden, experts = config["hidden_size"], config["num_local_experts"]
    yield from decoder.ends(config)
    for _, at in decoder.layers(config):
        yield from decoder.attention(config, at)
        moe = f"{at}.block_sparse_moe"
        yield TinyTensor(f"{moe}.gate.weight", (experts, hidden), Kind.PLAIN)
        for expert in range(experts):
            middle = config["intermediate_size"]
            yield from decoder.gated(f"{moe}.experts.{expert}", hidden, middle, ("w1", "w3", "w2"))


def _check(config: Config) -> None:
    decoder.check_heads(config)
    decoder.check_experts(config, "num_local_experts")


MIXTRAL = Declaration(
    {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        **decoder.SIZES,
        "intermediate_size": 48,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "sliding_window": None,
    },
    _tensors,
    _check,
)
