"""A model's vocabulary as grammars need it: the exact bytes of each id.

Made in the compiler's process: reading a tokenizer would stop the engine's threads for a while.
"""

from services.common.text import Tokenizer
from services.common.text.byte_level import byte_assets
from services.engine.model_files import load_text_assets

_IN_NO_TEXT = b"\xff"
"""No UTF-8 has this byte, so no rule for a text matches what begins with it."""


def model_tokenizer(model: str) -> Tokenizer:
    """The tokenizer of a model given by path or name; empty: a token per byte.

    Raises:
        ModelFileError: files that cannot be read.
    """
    return Tokenizer(load_text_assets(model) if model else byte_assets())


def vocabulary_of(tokenizer: Tokenizer, vocab_size: int) -> list[bytes]:
    """Those that the detokenizer joins, so a grammar holds for the very text that a reader gets.

    A reader gets no special token: theirs are bytes that no text holds, and only a structural tag
    that names the token meets them. Ids that only the logits have, or only the tokenizer, can
    never be drawn: they have none.
    """
    return [
        (_IN_NO_TEXT if tokenizer.is_special(token_id) else b"") + tokenizer.token_bytes(token_id)
        for token_id in range(min(vocab_size, tokenizer.vocab_size))
    ]
