"""A tokenizer for the `tokenizers` library out of GGUF metadata, and the chat template beside it.

Byte-level BPE ("gpt2") only; what splits text before BPE is named by `tokenizer.ggml.pre`.
"""

from collections.abc import Mapping
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from services.common.text.assets import TextAssets
from services.engine.models.config import ModelFileError

_CONTROL, _USER_DEFINED = 3, 4
_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPECIAL_NAMES = {
    "bos_token": "tokenizer.ggml.bos_token_id",
    "eos_token": "tokenizer.ggml.eos_token_id",
    "unk_token": "tokenizer.ggml.unknown_token_id",
    "pad_token": "tokenizer.ggml.padding_token_id",
}


def text_assets(metadata: Mapping[str, Any]) -> TextAssets:
    """Tokenizer, template and special tokens of a GGUF file.

    Raises:
        ModelFileError: a kind of tokenizer that is not built here.
    """
    tokens = _tokens(metadata)
    special = {
        name: tokens[metadata[key]]
        for name, key in _SPECIAL_NAMES.items()
        if 0 <= metadata.get(key, -1) < len(tokens)
    }
    return TextAssets.of(
        tokenizer_json=_tokenizer(metadata, tokens).to_str().encode(),
        chat_template=metadata.get("tokenizer.chat_template", ""),
        special_tokens=special,
        add_bos=bool(metadata.get("tokenizer.ggml.add_bos_token", False)),
    )


def _tokens(metadata: Mapping[str, Any]) -> list[str]:
    kind = metadata.get("tokenizer.ggml.model")
    if kind != "gpt2":
        raise ModelFileError(
            f"tokenizer.ggml.model {kind!r} is not supported in GGUF files, only 'gpt2' "
            "(byte-level BPE): use the model's Hugging Face folder instead"
        )
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    return tokens


def _tokenizer(metadata: Mapping[str, Any], tokens: list[str]) -> Tokenizer:
    merges = [tuple(line.split(" ", 1)) for line in metadata["tokenizer.ggml.merges"]]
    vocab = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(BPE(vocab=vocab, merges=merges, fuse_unk=False))
    tokenizer.pre_tokenizer = _splitter(metadata.get("tokenizer.ggml.pre", "default"))
    tokenizer.decoder = decoders.ByteLevel()
    types = metadata.get("tokenizer.ggml.token_type", [])
    for token, kind in zip(tokens, types, strict=False):
        if kind == _CONTROL:
            tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False)])
        elif kind == _USER_DEFINED:
            tokenizer.add_tokens([AddedToken(token, special=False, normalized=False)])
    return tokenizer


def _splitter(name: str) -> pre_tokenizers.PreTokenizer:
    gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    raw = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    if name in ("default", "gpt-2"):
        return gpt2
    if name in ("smollm", "starcoder", "refact", "codeshell"):
        digits = pre_tokenizers.Digits(individual_digits=True)
        return pre_tokenizers.Sequence([digits, gpt2])
    if name in ("llama-bpe", "llama3", "llama-v3"):
        pattern = _LLAMA3_SPLIT
    elif name == "qwen2":
        pattern = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")
    else:
        raise ModelFileError(
            f"tokenizer.ggml.pre {name!r} is not known here: use the Hugging Face folder instead"
        )
    split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    return pre_tokenizers.Sequence([split, raw])
