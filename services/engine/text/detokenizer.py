"""Incremental text of one choice: valid UTF-8 only, bytes are held until their character is whole.

What has been given out is a pure function of the tokens fed so far, however many come in a step.
"""

import codecs
from collections.abc import Sequence
from typing import Protocol

_LONGEST_CHARACTER = 4


class TokenBytes(Protocol):
    """What is needed of a tokenizer."""

    def token_bytes(self, token_id: int) -> bytes:
        """The token's own bytes, perhaps a part of a character."""

    def is_special(self, token_id: int) -> bool:
        """Whether the token never shows in text."""


class Detokenizer:
    """Feed tokens one by one; each call returns the text that became certain."""

    def __init__(
        self,
        tokens: TokenBytes,
        prompt_token_ids: Sequence[int] = (),
        shown_ids: frozenset[int] = frozenset(),
    ) -> None:
        """A character whose first bytes end the prompt is completed by the output.

        Args:
            shown_ids: special tokens that show in text all the same.
        """
        self._tokens = tokens
        self._shown_ids = shown_ids
        self._decoder = _fresh()
        self._prompt_tail = unfinished(_last_bytes(tokens, prompt_token_ids))

    def feed(self, token_id: int, *, shown: bool = True) -> str:
        """The text that this token made certain; none for special tokens and if not `shown`."""
        if not shown or (token_id not in self._shown_ids and self._tokens.is_special(token_id)):
            return ""
        raw = self._tokens.token_bytes(token_id)
        if raw and self._prompt_tail:
            tail, self._prompt_tail = self._prompt_tail, b""
            # If the output does not go on with the character, its beginning is the prompt's affair.
            raw = tail + raw if _goes_on(tail, raw) else raw
        return self._decoder.decode(raw)

    def flush(self) -> str:
        """At the end: bytes that never became a character, as U+FFFD."""
        return self._decoder.decode(b"", final=True)


def unfinished(raw: bytes) -> bytes:
    """The bytes at the end of `raw` that begin a character and do not finish it."""
    for length in range(1, min(len(raw), _LONGEST_CHARACTER - 1) + 1):
        tail = raw[-length:]
        if tail[0] >= 0xC0:
            return b"" if _fresh().decode(tail) else tail
    return b""


def _fresh() -> codecs.IncrementalDecoder:
    return codecs.getincrementaldecoder("utf-8")("replace")


def _goes_on(tail: bytes, raw: bytes) -> bool:
    """Whether the first byte of `raw` belongs to the character that `tail` begins."""
    return not _fresh().decode(tail + raw[:1]).startswith("\ufffd")


def _last_bytes(tokens: TokenBytes, token_ids: Sequence[int]) -> bytes:
    """The end of the prompt, enough for one character; a special token ends the search."""
    raw = b""
    for token_id in reversed(token_ids):
        if len(raw) >= _LONGEST_CHARACTER or tokens.is_special(token_id):
            break
        raw = tokens.token_bytes(token_id) + raw
    return raw[-_LONGEST_CHARACTER:]
