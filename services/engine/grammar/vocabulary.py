"""A model's vocabulary as the grammar compiler wants it: the exact bytes of each id."""

from collections.abc import Sequence

from services.common.text import TextAssets, Tokenizer
from services.engine.grammar.wire import Setup

MEMORY_BYTES = 1 << 30


def grammar_setup(
    assets: TextAssets,
    vocab_size: int,
    eos_token_ids: Sequence[int],
    memory_bytes: int = MEMORY_BYTES,
) -> Setup:
    """The compiler's setup for a model.

    The bytes are those that the detokenizer joins, so a grammar holds for the very text that the
    reader gets. Special and other added tokens have none: no free text may hold them. Ids that
    only the logits have, or only the tokenizer, can never be drawn.

    Args:
        vocab_size: width of the logits.
        eos_token_ids: all tokens that may end a complete answer.
        memory_bytes: what one compilation may take.
    """
    tokenizer = Tokenizer(assets)
    vocabulary = [
        b"" if tokenizer.is_added(token_id) else tokenizer.token_bytes(token_id)
        for token_id in range(min(vocab_size, tokenizer.vocab_size))
    ]
    return Setup(vocabulary, "RAW", vocab_size, list(eos_token_ids), memory_bytes)
