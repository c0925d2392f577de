"""A model's vocabulary as grammars need it: the exact bytes of each id.

Made in the compiler's process: reading a tokenizer would stop the engine's threads for a while.
"""

from services.common.text import TextAssets, Tokenizer
from services.common.text.byte_level import byte_assets
from services.engine.loader import load_text_assets


def model_vocabulary(model: str, vocab_size: int) -> list[bytes]:
    """The bytes of each id of a model given by path or name; empty: a token per byte.

    Raises:
        ModelFileError: files that cannot be read.
    """
    return vocabulary_of(load_text_assets(model) if model else byte_assets(), vocab_size)


def vocabulary_of(assets: TextAssets, vocab_size: int) -> list[bytes]:
    """Those that the detokenizer joins, so a grammar holds for the very text that a reader gets.

    Special tokens have none: no text holds them. Other added ones (`<tool_call>`, `</think>`) are
    text like any: a structural tag that names such a mark lets the model say it as it learnt to.
    Ids that only the logits have, or only the tokenizer, can never be drawn.
    """
    tokenizer = Tokenizer(assets)
    return [
        b"" if tokenizer.is_special(token_id) else tokenizer.token_bytes(token_id)
        for token_id in range(min(vocab_size, tokenizer.vocab_size))
    ]
