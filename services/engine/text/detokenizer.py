"""Incremental detokenization of one choice: bytes are held back until their character is complete.

The text so far is a pure function of the tokens so far, however they were grouped.
"""

import codecs
from collections.abc import Container, Sequence
from typing import Protocol

_LONGEST_CHARACTER = 4


class TokenBytes(Protocol):
    """The part of a tokenizer that detokenization needs."""

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token, possibly a part of a character."""

    def is_special(self, token_id: int) -> bool:
        """Whether the token is not part of the text."""


class Detokenizer:
    """Takes tokens one by one; each call returns the characters that became complete.

    Args:
        prompt_token_ids: if the prompt ends within a character, the output completes it.
        shown_ids: special tokens whose text is part of the output.
    """

    def __init__(
        self,
        tokens: TokenBytes,
        prompt_token_ids: Sequence[int] = (),
        shown_ids: Container[int] = frozenset(),
    ) -> None:
        self._tokens = tokens
        self._shown_ids = shown_ids
        self._decoder = _new_decoder()
        self._prompt_tail = unfinished(_last_bytes(tokens, prompt_token_ids))

    def feed(self, token_id: int, *, shown: bool = True) -> str:
        """Add a token and return the new text; special tokens and tokens not `shown` have none."""
        if not shown or (token_id not in self._shown_ids and self._tokens.is_special(token_id)):
            return ""
        raw = self._tokens.token_bytes(token_id)
        if raw and self._prompt_tail:
            tail, self._prompt_tail = self._prompt_tail, b""
            # Otherwise the incomplete character belongs to the prompt alone.
            raw = tail + raw if _continues(tail, raw) else raw
        return self._decoder.decode(raw)

    def flush(self) -> str:
        """Return the bytes held back at the end of the output, as U+FFFD."""
        return self._decoder.decode(b"", final=True)


def unfinished(raw: bytes) -> bytes:
    """The bytes of an incomplete character at the end of `raw`."""
    for length in range(1, min(len(raw), _LONGEST_CHARACTER - 1) + 1):
        tail = raw[-length:]
        if tail[0] >= 0xC0:
            return b"" if _new_decoder().decode(tail) else tail
    return b""


def _new_decoder() -> codecs.IncrementalDecoder:
    return codecs.getincrementaldecoder("utf-8")("replace")


def _continues(tail: bytes, raw: bytes) -> bool:
    """Whether the first byte of `raw` belongs to the character that `tail` begins."""
    return not _new_decoder().decode(tail + raw[:1]).startswith("\ufffd")


def _last_bytes(tokens: TokenBytes, token_ids: Sequence[int]) -> bytes:
    """The last bytes of the prompt, enough for one character, up to a special token."""
    raw = b""
    for token_id in reversed(token_ids):
        if len(raw) >= _LONGEST_CHARACTER or tokens.is_special(token_id):
            break
        raw = tokens.token_bytes(token_id) + raw
    return raw[-_LONGEST_CHARACTER:]
