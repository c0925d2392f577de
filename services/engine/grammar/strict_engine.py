"""llguidance, the second engine: compiles schemas that xgrammar cannot enforce, and matches tokens.

It is imported when it is first needed. End tokens never reach it: the matcher handles them itself,
because a model can have several.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from services.engine.grammar.wire import MAX_WHITESPACE, Ready, Setup

# Without "u": the engine compares names as they are written, so an escaped letter would let a
# declared name pass as an undeclared one.
_OPTIONS: Any = {
    "whitespace_pattern": f"[ \\n\\t]{{0,{MAX_WHITESPACE}}}",
    "json_allowed_escapes": 'nrbtf\\"',
    "json_allow_general_unicode_escapes": False,
}


class StrictCompiler:
    """Compiles schemas for one vocabulary."""

    def __init__(self, setup: Setup, ready: Ready) -> None:
        self._setup = setup
        self._ready = ready
        self._tokenizer: Any = None

    def load(self) -> None:
        """Import the engine and build its vocabulary, once.

        Raises:
            ImportError: the engine is not installed.
        """
        if self._tokenizer is None:
            self._tokenizer = _make_tokenizer(self._setup, self._ready)

    def compile(self, schema: Any) -> str:
        """The grammar of a schema that `strict_schema` wrote.

        Raises:
            ValueError: the engine does not enforce all of it; the message says why, without a path.
        """
        from llguidance import LLMatcher

        self.load()
        grammar = str(LLMatcher.grammar_from_json_schema(schema, overrides=_OPTIONS))
        failed, messages = LLMatcher.validate_grammar_with_warnings(grammar, self._tokenizer)
        if failed or messages:
            raise ValueError(f"cannot be enforced: {_plain(' '.join(messages))}")
        first = self.start(grammar)
        first.compute_bitmask()  # the limits of the compilation hold for the first mask too
        if first.is_error():
            problem = str(first.get_error()).strip().splitlines()[0]
            raise ValueError(f"cannot be enforced: {_plain(problem)}")
        return grammar

    def start(self, grammar: str) -> Any:
        """A matcher of the engine at the start of a grammar."""
        from llguidance import LLMatcher

        self.load()
        return LLMatcher(self._tokenizer, grammar, log_level=0)


class _Vocabulary:
    """What the engine reads of a tokenizer.

    Where only one text can follow, the engine allows the first token of its tokenization only. The
    longest tokens are taken: the model's own merges are not known here.
    """

    bos_token_id = None
    special_token_ids: tuple[int, ...] = ()

    def __init__(self, tokens: list[bytes], eos_token_id: int) -> None:
        self.tokens = tokens
        self.eos_token_id = eos_token_id
        self._ids = {word: i for i, word in reversed(list(enumerate(tokens))) if word}
        self._longest = max(map(len, self._ids), default=0)

    def __call__(self, text: bytes | str) -> list[int]:
        rest = text.encode() if isinstance(text, str) else text
        ids: list[int] = []
        while rest:
            sizes = range(min(len(rest), self._longest), 0, -1)
            size = next((size for size in sizes if rest[:size] in self._ids), None)
            if size is None:
                break
            ids.append(self._ids[rest[:size]])
            rest = rest[size:]
        return ids


class StrictState:
    """One sequence's state in a grammar of llguidance."""

    def __init__(self, start: Any, end_ids: Sequence[int]) -> None:
        self._matcher = start.deep_copy()
        self._end_ids = frozenset(end_ids)
        self._ended = 0

    def accept(self, token_id: int) -> bool:
        """Advance by one token; False, and no change, if it is not allowed."""
        if self._ended:
            return False
        if token_id in self._end_ids:
            self._ended = int(self._matcher.is_accepting())
            return bool(self._ended)
        return bool(self._matcher.try_consume_tokens([token_id]) == 1)

    def fill(self, words: NDArray[np.int32]) -> bool:
        """Write the mask of the next token, int32 [1, n]; returns whether it forbids any."""
        self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        return True

    @property
    def has_ended(self) -> bool:
        """Whether an end token was accepted."""
        return bool(self._ended)

    @property
    def is_complete(self) -> bool:
        """Whether the text is a complete answer."""
        return bool(self._matcher.is_accepting())

    @property
    def has_failed(self) -> bool:
        """Whether the engine gave up at one of its limits."""
        return bool(self._matcher.is_error())

    def rollback(self, count: int) -> bool:
        """Take back the last tokens; False if that is impossible."""
        text_tokens = count - self._ended
        if count and self._ended:
            self._ended = 0
        return text_tokens <= 0 or bool(self._matcher.rollback(text_tokens))

    def forced(self) -> bytes:
        """The bytes that must follow."""
        return bytes(self._matcher.compute_ff_bytes())


def _plain(problem: str) -> str:
    """The engine's message in one line, without its own form of patterns."""
    text = " ".join(problem.split())
    if "Regex is empty" in text:
        return "no text meets the pattern, format, lengths and values of a string"
    if "regex parse error" in text:
        return f"a pattern is not a valid regular expression: {text.rpartition('error: ')[2]}"[:300]
    return text[:300]


def _make_tokenizer(setup: Setup, ready: Ready) -> Any:
    from llguidance import LLTokenizer, TokenizerWrapper

    padding = [b""] * (setup.vocab_size - len(ready.vocabulary))

    end = setup.eos_token_ids[0] if setup.eos_token_ids else setup.vocab_size - 1
    vocabulary = _Vocabulary([*ready.vocabulary, *padding], end)
    return LLTokenizer(
        TokenizerWrapper(vocabulary),
        eos_token=list(setup.eos_token_ids) or None,
        slices=LLTokenizer.json_slices(),
    )
