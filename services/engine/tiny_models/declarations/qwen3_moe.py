"""Qwen3 with experts: the feed-forward part of each layer is a router and experts."""

from collections.abc import Iterator

from services.engine.tiny_models.declaration import Config, Declaration, Kind, TinyTensor
from services.engine.tiny_models.declarations import decoder


def _tensors(config: Config) -> Iterator[TinyTensor]:
    hidden, experts = config["hidden_size"], config["num_experts"]
    yield from decoder.ends(config)
    for index, at in decoder.layers(config):
        yield from decoder.attention(config, at, head_norms=True)
        # As the engine reads it: every so many layers, counted from 1, and those not listed.
        if index in config["mlp_only_layers"] or (index + 1) % config["decoder_sparse_step"]:
            yield from decoder.gated(f"{at}.mlp", hidden, config["intermediate_size"])
            continue
        yield TinyTensor(f"{at}.mlp.gate.weight", (experts, hidden), Kind.PLAIN)
        for expert in range(experts):
            middle = config["moe_intermediate_size"]
            yield from decoder.gated(f"{at}.mlp.experts.{expert}", hidden, middle)


def _check(config: Config) -> None:
    decoder.check_heads(config)
    decoder.check_sizes(config, "moe_intermediate_size", "decoder_sparse_step")
    decoder.check_experts(config, "num_experts")


QWEN3_MOE = Declaration(
    {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        **decoder.SIZES,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
    _tensors,
    _check,
)
