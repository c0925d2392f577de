"""What the tool must know of an architecture: its config.json, and its tensors."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from tokenizers import Tokenizer

Config = Mapping[str, Any]
"""The content of config.json."""


class Kind(Enum):
    """What a tensor is, which decides its values and how it is stored."""

    MATRIX = "matrix"
    """[out, in] of a linear layer; quantised formats quantise it."""
    PLAIN = "plain"
    """A matrix that quantised formats leave alone: embeddings, heads, routers."""
    NORM = "norm"
    """Near one."""
    BIAS = "bias"
    """Near zero: biases, sinks, and norms to which the model adds one."""
    STACK = "stack"
    """[experts, in, out], one matrix per expert; no format quantises it."""
    TABLE = "table"
    """[tokens, chosen] int64 in every format: different whole numbers in each row."""


@dataclass(frozen=True, slots=True)
class TinyTensor:
    """One tensor as published."""

    name: str
    shape: tuple[int, ...]
    kind: Kind = Kind.MATRIX
    float32: bool = False
    """Stored as float32 in every format."""
    scale: float = 1.0
    """What random values are multiplied with."""
    below: int = 0
    """Of a TABLE: its numbers are less."""
    factors: str = "{}.weight_scale_inv"
    """Name of the scales that FP8 stores beside the matrix; {} is its name without `.weight`."""


@dataclass(frozen=True, slots=True)
class ControlTokens:
    """The control tokens of a tokenizer, in the order of their ids."""

    begin: str
    ends: tuple[str, ...]
    """Tokens that end an answer; the first one ends a sequence."""
    others: tuple[str, ...] = ()


CHAT_TOKENS = ControlTokens(
    "<|begin_of_text|>", ("<|end_of_text|>", "<|im_end|>"), ("<|im_start|>",)
)
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass(frozen=True, slots=True)
class Declaration:
    """One architecture."""

    config: Config
    """config.json of the tiny model without `vocab_size`, token ids and number formats."""
    tensors: Callable[[Config], Iterator[TinyTensor]]
    """The tensors that follow from a whole config.json."""
    check: Callable[[Config], None] = field(default=lambda config: None)
    """Raises ValueError, naming the key, if the sizes of a config do not fit one another."""
    formats: tuple[str, ...] = ("float32", "bfloat16", "fp8")
    """Names of the formats that its weights may have."""
    control_tokens: ControlTokens = CHAT_TOKENS
    derive: Callable[[Config, Tokenizer], Config] = field(default=lambda config, tokenizer: {})
    """Further keys of config.json, which follow from the others and from the tokenizer. Raises
    ValueError, naming the key, if one that it needs is invalid."""
    text_part: str = ""
    """The key of config.json under which the sizes are, where a publisher puts them there."""
    chat_template: str = CHAT_TEMPLATE
    """Empty: the publisher has none, and renders chats with a library of its own."""
