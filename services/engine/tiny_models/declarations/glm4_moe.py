"""GLM 4.5: grouped-query attention with biases and half-rotated heads, experts as DeepSeek-V3's."""

from collections.abc import Iterator

from services.engine.tiny_models.declaration import Config, Declaration, TinyTensor
from services.engine.tiny_models.declarations import decoder, grouped


def _tensors(config: Config) -> Iterator[TinyTensor]:
    yield from decoder.ends(config)
    for index, at in decoder.layers(config):
        norms = config["use_qk_norm"]
        yield from decoder.attention(config, at, biases=config["attention_bias"], head_norms=norms)
        yield from grouped.feed_forward(config, index, at)


def _check(config: Config) -> None:
    decoder.check_heads(config)
    grouped.check_groups(config)


GLM4_MOE = Declaration(
    {
        "architectures": ["Glm4MoeForCausalLM"],
        "model_type": "glm4_moe",
        **decoder.SIZES,
        **grouped.EXPERTS,
        "attention_bias": True,
        "use_qk_norm": True,
        "partial_rotary_factor": 0.5,
    },
    _tensors,
    _check,
)
