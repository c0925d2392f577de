"""Llama, Mistral, Qwen2 and Qwen3: decoders that differ in biases and norms of heads."""

from collections.abc import Callable, Iterator

from services.engine.tiny_models.declaration import Config, Declaration, TinyTensor
from services.engine.tiny_models.declarations import decoder


def _tensors(
    *, biases: bool = False, head_norms: bool = False
) -> Callable[[Config], Iterator[TinyTensor]]:
    def tensors(config: Config) -> Iterator[TinyTensor]:
        yield from decoder.ends(config)
        for _, at in decoder.layers(config):
            yield from decoder.attention(config, at, biases=biases, head_norms=head_norms)
            sizes = config["hidden_size"], config["intermediate_size"]
            yield from decoder.gated(f"{at}.mlp", *sizes)

    return tensors


def _declared(model_type: str, class_name: str, **different: object) -> dict[str, object]:
    return {
        "architectures": [class_name],
        "model_type": model_type,
        **decoder.SIZES,
        **different,
    }


LLAMA = Declaration(_declared("llama", "LlamaForCausalLM"), _tensors(), decoder.check_heads)
MISTRAL = Declaration(
    _declared("mistral", "MistralForCausalLM", sliding_window=None),
    _tensors(),
    decoder.check_heads,
)
QWEN2 = Declaration(
    _declared("qwen2", "Qwen2ForCausalLM", tie_word_embeddings=True),
    _tensors(biases=True),
    decoder.check_heads,
)
QWEN3 = Declaration(
    _declared("qwen3", "Qwen3ForCausalLM", head_dim=32),
    _tensors(head_norms=True),
    decoder.check_heads,
)
