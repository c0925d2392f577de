"""Builds a tokenizer for the `tokenizers` library from GGUF metadata, and reads the chat template.

There are two kinds: byte-level BPE ("gpt2"), whose split `tokenizer.ggml.pre` names, and
SentencePiece BPE ("llama").
"""

from collections.abc import Mapping
from typing import Any

from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE

from services.common.text.assets import TextAssets
from services.engine.contract.model_config import ModelFileError
from services.engine.model_files.gguf_splits import Split, find_split
from services.engine.model_files.spm_tokenizer import (
    CONTROL,
    NORMAL,
    Pieces,
    add_special,
    spm_tokenizer,
)

_AT = "tokenizer.ggml"
_SPECIAL_NAMES = {
    "bos_token": f"{_AT}.bos_token_id",
    "eos_token": f"{_AT}.eos_token_id",
    "unk_token": f"{_AT}.unknown_token_id",
    "pad_token": f"{_AT}.padding_token_id",
}
_EOS_KEYS = (f"{_AT}.eos_token_id", f"{_AT}.eot_token_id", f"{_AT}.eom_token_id")
_TURN_ENDS = frozenset({"<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<end_of_turn>"})
"""Control tokens that end a turn in every model that has them; files often name only one end."""


def text_assets(metadata: Mapping[str, Any]) -> TextAssets:
    """Tokenizer, template and special tokens of a GGUF file.

    Raises:
        ModelFileError: the kind of tokenizer is not supported, or a list is missing.
    """
    tokens = _list(metadata, "tokens")
    special = {
        name: tokens[metadata[key]]
        for name, key in _SPECIAL_NAMES.items()
        if 0 <= metadata.get(key, -1) < len(tokens)
    }
    tokenizer, add_bos = _build(metadata, tokens)
    return TextAssets.of(
        tokenizer_json=tokenizer.to_str().encode(),
        chat_template=metadata.get("tokenizer.chat_template", ""),
        special_tokens=special,
        add_bos=bool(metadata.get(f"{_AT}.add_bos_token", add_bos)),
    )


def eos_ids(metadata: Mapping[str, Any]) -> tuple[int, ...]:
    """End-of-sequence ids: those that the file names by key, then known ends of a turn."""
    tokens, types = metadata.get(f"{_AT}.tokens", ()), metadata.get(f"{_AT}.token_type", ())
    named = [metadata[key] for key in _EOS_KEYS if key in metadata]
    ends = [
        index
        for index, (token, kind) in enumerate(zip(tokens, types, strict=False))
        if kind == CONTROL and token in _TURN_ENDS
    ]
    return tuple(dict.fromkeys((*named, *ends)))


def _build(metadata: Mapping[str, Any], tokens: list[str]) -> tuple[Tokenizer, bool]:
    """The tokenizer, and whether text starts with BOS unless the file sets `add_bos_token`."""
    kind = metadata.get(f"{_AT}.model")
    if kind == "gpt2":
        split = find_split(metadata.get(f"{_AT}.pre", "default"))
        return _byte_level(metadata, tokens, split), split.add_bos
    if kind == "llama":
        pieces = Pieces(tokens, _list(metadata, "scores"), _list(metadata, "token_type"))
        add_prefix = bool(metadata.get(f"{_AT}.add_space_prefix", True))
        return spm_tokenizer(pieces, add_prefix=add_prefix), True
    raise ModelFileError(
        f"{_AT}.model {kind!r} is not supported in GGUF files, only 'gpt2' (byte-level BPE) and "
        "'llama' (SentencePiece BPE): use the model's Hugging Face folder instead"
    )


def _byte_level(metadata: Mapping[str, Any], tokens: list[str], split: Split) -> Tokenizer:
    types = metadata.get(f"{_AT}.token_type", [])
    merges = [_pair(line) for line in _merges(metadata, tokens, types)]
    vocab = {token: index for index, token in enumerate(tokens)}
    try:
        model = BPE(vocab=vocab, merges=merges, fuse_unk=False, ignore_merges=split.whole_words)
    except Exception as error:  # the library raises bare Exception
        raise ModelFileError(f"{_AT}.merges does not fit the tokens: {error}") from error
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = split.pre_tokenizer()
    tokenizer.decoder = decoders.ByteLevel()
    add_special(tokenizer, tokens, types)
    return tokenizer


def _merges(metadata: Mapping[str, Any], tokens: list[str], types: list[int]) -> list[str]:
    """The merges. A vocabulary of single bytes has none, and writers then omit the key."""
    learnt = (t for t, kind in zip(tokens, types, strict=False) if kind == NORMAL)
    if f"{_AT}.merges" not in metadata and types and all(len(token) == 1 for token in learnt):
        return []
    return _list(metadata, "merges")


def _pair(line: str) -> tuple[str, str]:
    left, _, right = line.partition(" ")
    return left, right


def _list(metadata: Mapping[str, Any], name: str) -> list[Any]:
    value = metadata.get(f"{_AT}.{name}")
    if not isinstance(value, list):
        raise ModelFileError(
            f"{_AT}.{name} is missing: convert the model again with its tokenizer, or use the "
            "model's Hugging Face folder"
        )
    return value
