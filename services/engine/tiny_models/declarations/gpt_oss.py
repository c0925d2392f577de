"""gpt-oss: attention sinks, a window in every other layer, stacked experts with biases.

In the layout of its files in 16 bits; those in MXFP4 have blocks and scales in place of the stacks.
"""

from collections.abc import Iterator

from services.engine.tiny_models.declaration import Config, Declaration, Kind, TinyTensor
from services.engine.tiny_models.declarations import decoder


def _tensors(config: Config) -> Iterator[TinyTensor]:
    hidden, middle = config["hidden_size"], config["intermediate_size"]
    experts = config["num_local_experts"]
    yield from decoder.ends(config)
    for _, at in decoder.layers(config):
        yield from decoder.attention(config, at, biases=True, output_bias=True)
        yield TinyTensor(f"{at}.self_attn.sinks", (config["num_attention_heads"],), Kind.BIAS)
        yield TinyTensor(f"{at}.mlp.router.weight", (experts, hidden), Kind.PLAIN)
        yield TinyTensor(f"{at}.mlp.router.bias", (experts,), Kind.BIAS)
        for name, inputs, outputs in (
            ("gate_up_proj", hidden, 2 * middle),
            ("down_proj", middle, hidden),
        ):
            stack = f"{at}.mlp.experts.{name}"
            yield TinyTensor(stack, (experts, inputs, outputs), Kind.STACK)
            yield TinyTensor(f"{stack}_bias", (experts, outputs), Kind.BIAS)


def _check(config: Config) -> None:
    decoder.check_heads(config)
    decoder.check_sizes(config, "sliding_window")
    decoder.check_experts(config, "num_local_experts")


GPT_OSS = Declaration(
    {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        **decoder.SIZES,
        "intermediate_size": 32,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "attention_bias": True,
        "swiglu_limit": 7.0,
        "sliding_window": 32,
        "rope_theta": 150000.0,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 4.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 512,
        },
    },
    _tensors,
    _check,
    formats=("float32", "bfloat16"),
)
