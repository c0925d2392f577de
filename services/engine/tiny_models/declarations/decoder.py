"""Tensors and checks that most decoders share, by the usual keys of config.json."""

from collections.abc import Iterator

from services.engine.tiny_models.declaration import Config, Kind, TinyTensor

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
"""Small, but with several heads per key head and more than one block of 128 in a feed-forward."""


def ends(
    config: Config, *, norm: Kind = Kind.NORM, embedding_scale: float = 1.0
) -> Iterator[TinyTensor]:
    """Embeddings, last norm and head."""
    vocabulary, hidden = config["vocab_size"], config["hidden_size"]
    name = "model.embed_tokens.weight"
    yield TinyTensor(name, (vocabulary, hidden), Kind.PLAIN, scale=embedding_scale)
    yield TinyTensor("model.norm.weight", (hidden,), norm)
    if not config["tie_word_embeddings"]:
        yield TinyTensor("lm_head.weight", (vocabulary, hidden), Kind.PLAIN)


def attention(
    config: Config,
    at: str,
    *,
    biases: bool = False,
    output_bias: bool = False,
    head_norms: bool = False,
    norm: Kind = Kind.NORM,
) -> Iterator[TinyTensor]:
    """Grouped-query attention of the layer `at`, and the norms before and after it."""
    hidden, width = config["hidden_size"], config["head_dim"]
    queries = config["num_attention_heads"] * width
    keys = config["num_key_value_heads"] * width
    yield TinyTensor(f"{at}.input_layernorm.weight", (hidden,), norm)
    for part, rows in (("q", queries), ("k", keys), ("v", keys)):
        yield TinyTensor(f"{at}.self_attn.{part}_proj.weight", (rows, hidden))
        if biases:
            yield TinyTensor(f"{at}.self_attn.{part}_proj.bias", (rows,), Kind.BIAS)
    yield TinyTensor(f"{at}.self_attn.o_proj.weight", (hidden, queries))
    if output_bias:
        yield TinyTensor(f"{at}.self_attn.o_proj.bias", (hidden,), Kind.BIAS)
    if head_norms:
        yield TinyTensor(f"{at}.self_attn.q_norm.weight", (width,), norm)
        yield TinyTensor(f"{at}.self_attn.k_norm.weight", (width,), norm)
    yield TinyTensor(f"{at}.post_attention_layernorm.weight", (hidden,), norm)


def gated(
    at: str,
    hidden: int,
    middle: int,
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
) -> Iterator[TinyTensor]:
    """A gated feed-forward, or one expert."""
    gate, up, down = names
    yield TinyTensor(f"{at}.{gate}.weight", (middle, hidden))
    yield TinyTensor(f"{at}.{up}.weight", (middle, hidden))
    yield TinyTensor(f"{at}.{down}.weight", (hidden, middle))


def layers(config: Config) -> Iterator[tuple[int, str]]:
    """Index and prefix of each layer."""
    for index in range(config["num_hidden_layers"]):
        yield index, f"model.layers.{index}"


def check_heads(config: Config) -> None:
    """Raises:
    ValueError: a size is no positive integer, or the heads do not fit one another.
    """
    names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    check_sizes(config, *names, "head_dim", "intermediate_size", "vocab_size")
    heads, groups = config["num_attention_heads"], config["num_key_value_heads"]
    if heads % groups:
        raise ValueError(
            f"num_attention_heads {heads} is no multiple of num_key_value_heads {groups}"
        )
    if config["head_dim"] % 2:
        raise ValueError(f"head_dim {config['head_dim']} is odd: rotation works on pairs")


def check_sizes(config: Config, *keys: str) -> None:
    """Raises:
    ValueError: a value of these keys is no positive integer.
    """
    for key in keys:
        if type(config[key]) is not int or config[key] < 1:
            raise ValueError(f"{key} must be a positive integer, got {config[key]!r}")


def check_experts(config: Config, experts: str) -> None:
    """Check the number of experts, under the key `experts`, and of the chosen ones.

    Raises:
        ValueError: one is no positive integer, or more are chosen than there are.
    """
    check_sizes(config, experts, "num_experts_per_tok")
    chosen = config["num_experts_per_tok"]
    if chosen > config[experts]:
        raise ValueError(f"num_experts_per_tok {chosen} is above {experts} {config[experts]}")
