"""Log probabilities in the forms of both OpenAI endpoints: always finite, with exact bytes."""

import codecs
import math
from collections.abc import Iterable, Sequence
from typing import Any

from inferfleet_proto.v1 import inference_pb2

# JSON has no -Infinity; OpenAI's own server writes this number for impossible tokens.
LOWEST = -9999.0

TokenLogprob = inference_pb2.TokenLogprob


def chat_entries(tokens: Iterable[TokenLogprob]) -> list[dict[str, Any]]:
    """The entries of choices[].logprobs.content."""
    return [{**_entry(token), "top_logprobs": [_entry(t) for t in token.top]} for token in tokens]


class LegacyLogprobs:
    """choices[].logprobs of /v1/completions; text_offset counts across the chunks of a stream."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def add_tokens(self, tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
        """The columns for the next tokens."""
        offsets = []
        for token in tokens:
            offsets.append(self._offset)
            self._offset += len(self._decoder.decode(token.token))
        return {
            "tokens": [_text(token) for token in tokens],
            "token_logprobs": [_value(token) for token in tokens],
            "top_logprobs": [_alternatives(token) for token in tokens],
            "text_offset": offsets,
        }


def shown(
    tokens: Iterable[TokenLogprob], hidden: frozenset[int]
) -> list[inference_pb2.TokenLogprob]:
    """The tokens without the hidden ones, which end an answer and are not part of its text."""
    return [token for token in tokens if token.token_id not in hidden]


def _entry(token: TokenLogprob) -> dict[str, Any]:
    return {"token": _text(token), "logprob": _value(token), "bytes": list(token.token)}


def _alternatives(token: TokenLogprob) -> dict[str, float | None] | None:
    if not token.HasField("logprob"):
        return None
    return {_text(t): _value(t) for t in token.top}


def _text(token: TokenLogprob) -> str:
    return token.token.decode(errors="replace")


def _value(token: TokenLogprob) -> float | None:
    if not token.HasField("logprob"):
        return None
    return token.logprob if math.isfinite(token.logprob) else LOWEST
