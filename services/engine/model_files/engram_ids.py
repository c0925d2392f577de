"""Compressed token ids of DeepSeek V4.1's look-ups by n-gram, from the texts of the tokenizer.

A mistake is found by `engram_compressed_vocab_size` of the configuration: how many there are.
"""

from dataclasses import replace
from pathlib import Path

from tokenizers import Regex, Tokenizer, normalizers

from services.engine.contract.deepseek_v41 import DeepseekV41Config
from services.engine.contract.model_config import ModelConfig, ModelFileError

_NOT_TEXT = "\ufffd"
"""In the text of a token that is a part of a character."""
_SPACE = "\ue000"
"""Stands for a lone space while spaces around a text are removed."""


def with_token_ids(config: ModelConfig, folder: Path) -> ModelConfig:
    """A V4.1 model's configuration with the compressed ids of its tokenizer; others as they are.

    Raises:
        ModelFileError: there is no tokenizer.json, or it gives another number of ids than
            config.json says.
    """
    v41 = config.v4
    if not isinstance(v41, DeepseekV41Config):
        return config
    path = folder / "tokenizer.json"
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the package raises nothing more specific
        raise ModelFileError(f"{path}: needed for look-ups by n-gram: {error}") from error
    engram = v41.engram
    ids = compressed_ids(tokenizer)
    found, wanted = len(set(ids)), engram.num_ids
    if found != wanted:
        raise ModelFileError(
            f"{path}: the texts of its tokens have {found} forms, but config.json has "
            f"engram_compressed_vocab_size {wanted}: the two do not belong together"
        )
    pad = ids[engram.pad_token] if engram.pad_token < len(ids) else None
    if pad is None:
        raise ModelFileError(
            f"{path}: engram_pad_token_id {engram.pad_token} is beyond its {len(ids)} tokens"
        )
    # Rows of the embedding that no token uses count as padding.
    ids = [*ids, *[pad] * (v41.vocab_size - len(ids))][: v41.vocab_size]
    return replace(config, v4=replace(v41, engram=replace(engram, ids=tuple(ids))))


def compressed_ids(tokenizer: Tokenizer) -> list[int]:
    """By token id: a number that tokens share whose texts differ in case, accents or spaces only.

    Numbers are given in the order of first appearance. A part of a character is compared by its
    form in the vocabulary, and a text that is nothing else by itself.
    """
    plain = _plain_texts()
    known: dict[str, int] = {}
    ids = []
    for token in range(tokenizer.get_vocab_size(with_added_tokens=True)):
        text = tokenizer.decode([token], skip_special_tokens=False)
        if _NOT_TEXT in text:
            key = tokenizer.id_to_token(token) or text
        else:
            key = plain.normalize_str(text) or text
        ids.append(known.setdefault(key, len(known)))
    return ids


def _plain_texts() -> normalizers.Normalizer:
    return normalizers.Sequence(
        [
            normalizers.NFKC(),
            normalizers.NFD(),
            normalizers.StripAccents(),
            normalizers.Lowercase(),
            normalizers.Replace(Regex(r"[ \t\r\n]+"), " "),
            normalizers.Replace(Regex("^ $"), _SPACE),
            normalizers.Strip(),
            normalizers.Replace(_SPACE, " "),
        ]
    )
