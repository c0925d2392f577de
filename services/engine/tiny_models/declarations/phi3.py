"""Phi 3: one matrix projects to queries, keys and values, one to gate and up."""

from collections.abc import Iterator

from services.engine.tiny_models.declaration import Config, Declaration, Kind, TinyTensor
from services.engine.tiny_models.declarations import decoder


def _tensors(config: Config) -> Iterator[TinyTensor]:
    hidden, middle, width = (
        config[key] for key in ("hidden_size", "intermediate_size", "head_dim")
    )
    heads, groups = config["num_attention_heads"], config["num_key_value_heads"]
    yield from decoder.ends(config)
    for _, at in decoder.layers(config):
        yield TinyTensor(f"{at}.input_layernorm.weight", (hidden,), Kind.NORM)
        joined = (heads + 2 * groups) * width
        yield TinyTensor(f"{at}.self_attn.qkv_proj.weight", (joined, hidden))
        yield TinyTensor(f"{at}.self_attn.o_proj.weight", (hidden, heads * width))
        yield TinyTensor(f"{at}.post_attention_layernorm.weight", (hidden,), Kind.NORM)
        yield TinyTensor(f"{at}.mlp.gate_up_proj.weight", (2 * middle, hidden))
        yield TinyTensor(f"{at}.mlp.down_proj.weight", (hidden, middle))


PHI3 = Declaration(
    {
        "architectures": ["Phi3ForCausalLM"],
        "model_type": "phi3",
        **decoder.SIZES,
        "sliding_window": 32,
        # The default of transformers is beyond a small vocabulary.
        "pad_token_id": None,
    },
    _tensors,
    decoder.check_heads,
)
