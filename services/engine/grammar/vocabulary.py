"""A model's vocabulary for grammars: the exact bytes of each token id.

The compiler's process makes it, because reading a tokenizer would block the engine's threads.
"""

from services.common.text import Tokenizer
from services.common.text.byte_level import byte_assets
from services.engine.model_files import load_text_assets

_IN_NO_TEXT = b"\xff"
"""No valid UTF-8 has this byte, so no grammar rule for text matches a token that begins with it."""


def model_tokenizer(model: str) -> Tokenizer:
    """The tokenizer of a model given by path or name; for an empty string, one token per byte.

    Raises:
        ModelFileError: the files cannot be read.
    """
    return Tokenizer(load_text_assets(model) if model else byte_assets())


def vocabulary_of(tokenizer: Tokenizer, vocab_size: int) -> list[bytes]:
    """The bytes that the detokenizer joins, so a grammar holds for exactly the text that is sent.

    Special tokens are not part of the text: they get bytes that no text has, so only a structural
    tag that names the token matches them. Ids that only the logits or only the tokenizer have can
    never be sampled and are left out.
    """
    return [
        (_IN_NO_TEXT if tokenizer.is_special(token_id) else b"") + tokenizer.token_bytes(token_id)
        for token_id in range(min(vocab_size, tokenizer.vocab_size))
    ]
