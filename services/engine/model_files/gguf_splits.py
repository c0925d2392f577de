"""Patterns that split text before byte-level BPE, by the name in `tokenizer.ggml.pre`.

A name stands for the pattern with which the model was trained. The patterns are those of the
published tokenizer.json files. "default" is llama.cpp's pattern for files without a name.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tokenizers import Regex, pre_tokenizers

from services.engine.contract.model_config import ModelFileError

_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_REST}"
_QWEN2 = rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_REST}"
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]*[{_LOWER}]+|[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]+[{_LOWER}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True)
class Split:
    """Patterns; each splits the pieces that the one before produced."""

    patterns: Sequence[str]
    whole_words: bool = False
    """A piece that is a token of the vocabulary becomes that token, without merges."""
    add_bos: bool = False
    """Whether text starts with the BOS token, unless the file sets `add_bos_token`."""

    def pre_tokenizer(self) -> pre_tokenizers.PreTokenizer:
        """The patterns, then the mapping of bytes to the characters of the vocabulary."""
        splits = [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in self.patterns
        ]
        raw = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        return pre_tokenizers.Sequence([*splits, raw])


_DIGITS_GPT2 = Split((r"\p{N}", _GPT2))
_LLAMA3_SPLIT = Split((_LLAMA3,), whole_words=True, add_bos=True)
_SPLITS: Mapping[str, Split] = {
    "default": Split((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
    "gpt-2": Split((_GPT2,)),
    "mpt": Split((_GPT2,)),
    "olmo": Split((_GPT2,)),
    "phi-2": Split((_GPT2,)),
    "smollm": _DIGITS_GPT2,
    "starcoder": _DIGITS_GPT2,
    "refact": _DIGITS_GPT2,
    "codeshell": _DIGITS_GPT2,
    "command-r": _DIGITS_GPT2,
    "minerva-7b": _DIGITS_GPT2,
    "llama-bpe": _LLAMA3_SPLIT,
    "llama3": _LLAMA3_SPLIT,
    "llama-v3": _LLAMA3_SPLIT,
    "falcon3": _LLAMA3_SPLIT,
    "deepseek-coder": Split((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", r"\p{N}")),
    "dbrx": Split((_LLAMA3,)),
    "smaug-bpe": Split((_LLAMA3,)),
    "qwen2": Split((_QWEN2,)),
    "deepseek-r1-qwen": Split((_QWEN2,)),
    "stablelm2": Split((_QWEN2,)),
    "megrez": Split((_QWEN2,)),
    "tekken": Split((_TEKKEN,), whole_words=True, add_bos=True),
}
NAMES = tuple(_SPLITS)


def find_split(name: str) -> Split:
    """The split of this name.

    Raises:
        ModelFileError: the name is unknown. Another split would produce other tokens.
    """
    if name not in _SPLITS:
        raise ModelFileError(
            f"tokenizer.ggml.pre {name!r} is not supported, only {', '.join(NAMES)}: "
            "use the model's Hugging Face folder instead"
        )
    return _SPLITS[name]
