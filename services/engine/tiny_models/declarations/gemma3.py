"""The text model of Gemma 3: a norm before and after each half of a layer, a window in most."""

from collections.abc import Iterator

from services.engine.tiny_models.declaration import Config, Declaration, Kind, TinyTensor
from services.engine.tiny_models.declarations import decoder

_NORM = Kind.BIAS
"""Stored less one."""


def _tensors(config: Config) -> Iterator[TinyTensor]:
    hidden = config["hidden_size"]
    # The model multiplies embeddings by the root of the hidden size.
    yield from decoder.ends(config, norm=_NORM, embedding_scale=2 / hidden**0.5)
    for _, at in decoder.layers(config):
        yield from decoder.attention(config, at, head_norms=True, norm=_NORM)
        for side in ("pre", "post"):
            yield TinyTensor(f"{at}.{side}_feedforward_layernorm.weight", (hidden,), _NORM)
        yield from decoder.gated(f"{at}.mlp", hidden, config["intermediate_size"])


def _check(config: Config) -> None:
    decoder.check_heads(config)
    decoder.check_sizes(config, "sliding_window", "sliding_window_pattern")


GEMMA3 = Declaration(
    {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        **{key: value for key, value in decoder.SIZES.items() if key != "hidden_act"},
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 16,
        "rope_theta": 1000000.0,
        "rope_local_base_freq": 10000.0,
        "sliding_window": 32,
        "sliding_window_pattern": 2,
        "tie_word_embeddings": True,
    },
    _tensors,
    _check,
)
