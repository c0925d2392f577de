"""`FinishReason`: why a choice ended."""

import enum


class FinishReason(enum.StrEnum):
    """Names of the proto's FinishReason without its prefix.

    STOP_STRING is found by whoever owns the text (the front, `LLM`); the core gives all others.
    """

    EOS = "EOS"
    STOP_TOKEN = "STOP_TOKEN"
    STOP_STRING = "STOP_STRING"
    MAX_TOKENS = "MAX_TOKENS"
    CONTEXT_FULL = "CONTEXT_FULL"
    GRAMMAR_COMPLETE = "GRAMMAR_COMPLETE"
