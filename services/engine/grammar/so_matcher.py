"""`SOMatcher`: one sequence's place in its grammar, and the ids that may follow.

xgrammar is loaded by `Preload`, else with the first grammar on the thread that brings it.
"""

import importlib
import logging
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from services.engine.grammar.wire import Ready, Setup

log = logging.getLogger(__name__)

SLOW_TOKEN_S = 0.05
"""Time on this thread that one token may take; an ambiguous grammar takes ever more."""


@dataclass(frozen=True, slots=True)
class TokenWords:
    """Of one vocabulary; a bit per id, as in a mask."""

    num_words: int
    ends: NDArray[np.int32]
    """Ids that end a complete answer."""
    whole: NDArray[np.int32]
    """All but those whose bytes no text has."""
    after: Mapping[int, NDArray[np.int32]]
    """What keeps UTF-8 whole after an id that leaves a character begun."""

    @classmethod
    def of(cls, setup: Setup, ready: Ready) -> "TokenWords":
        """From what the compiler said of its vocabulary."""
        size = setup.vocab_size
        num_words = -(-size // 32)

        def words(ids: Iterable[int]) -> NDArray[np.int32]:
            bits = np.zeros(num_words * 32, dtype=np.uint8)
            bits[[i for i in ids if i < size]] = 1
            return np.packbits(bits, bitorder="little").view(np.int32)

        whole = ~words(ready.broken)
        after = {}
        for lead, token_ids in ready.pending.items():
            allowed = whole & ~words(ready.breaking[lead])
            after.update(dict.fromkeys(token_ids, allowed))
        return cls(num_words, words(setup.eos_token_ids), whole, after)


@dataclass(frozen=True, slots=True)
class Grammar:
    """A compiled grammar, shared by all who asked for it."""

    compiled: Any
    words: "TokenWords"
    num_bytes: int

    def matcher(self) -> "SOMatcher":
        """A place at its start."""
        return SOMatcher(self)


class Preload:
    """Loads xgrammar on a thread of its own; a second of the interpreter's lock that nobody feels
    while nobody is served."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin, once."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._load, name="grammar-preload", daemon=True)
            self._thread.start()

    def join(self) -> None:
        """Wait for the end, if it was begun."""
        if self._thread is not None:
            self._thread.join()

    @staticmethod
    def _load() -> None:
        try:
            importlib.import_module("xgrammar")
        except (ImportError, OSError) as error:  # constraints say so when there is one
            log.warning("constraints cannot be served: %s", error)


class GrammarLoader:
    """Takes in what the compiler's process made; loads xgrammar when constructed."""

    def __init__(self, setup: Setup) -> None:
        import xgrammar

        from services.engine.grammar.compiler_main import tokenizer_info

        self._setup = setup
        self._make_info = tokenizer_info
        self._deserialise = xgrammar.CompiledGrammar.deserialize_json
        self._info: Any = None
        self._words: TokenWords | None = None

    def load(self, serialised: str, ready: Ready) -> Grammar:
        """The grammar, for this process's matchers; `ready` is what the compiler said first."""
        self._info = self._info or self._make_info(self._setup, ready)
        self._words = self._words or TokenWords.of(self._setup, ready)
        compiled = self._deserialise(serialised, self._info)
        return Grammar(compiled, self._words, len(serialised))


class SOMatcher:
    """Advanced by each token that is drawn. The words of a mask have one bit per token id, 1 for
    allowed, 32 ids to an int32, the lowest bit first."""

    def __init__(self, grammar: Grammar) -> None:
        import xgrammar

        self._grammar = grammar
        self._matcher = xgrammar.GrammarMatcher(grammar.compiled)
        self._taken: list[int] = []
        self.mask: NDArray[np.int32] | None = None
        """int32 [ceil(vocabulary / 32)] of the ids allowed next, or None if all are; never
        written again. No bit at all: the grammar cannot go on."""
        self.spent = False
        """Whether the text is complete and nothing but its end can follow."""
        self.slow = False
        """Whether a token took longer than any may."""
        self._look()

    def accept(self, token_id: int) -> bool:
        """Advance by a drawn token; False if the grammar does not allow it."""
        return self.replay((token_id,))

    def replay(self, token_ids: Sequence[int]) -> bool:
        """Advance by several tokens; False if they do not fit the grammar."""
        began = time.thread_time()
        if not all(self._matcher.accept_token(token_id) for token_id in token_ids):
            return False
        self._taken += token_ids
        self._look()
        took_s = time.thread_time() - began
        self.slow = self.slow or took_s > SLOW_TOKEN_S * max(1, len(token_ids))
        return True

    def rollback(self, num_tokens: int) -> None:
        """Take back the last accepted tokens (refused drafts)."""
        self._matcher.rollback(num_tokens)
        del self._taken[len(self._taken) - num_tokens :]
        self._look()

    def _look(self) -> None:
        of = self._grammar.words
        words = np.full((1, of.num_words), -1, dtype=np.int32)
        if self._matcher.is_terminated():
            self.spent, self.mask = True, np.zeros_like(words[0])
            return
        narrowed = self._matcher.fill_next_token_bitmask(words)
        allowed = of.after.get(self._taken[-1]) if self._taken else None
        if not narrowed and allowed is None:
            self.spent, self.mask = False, None
            return
        self.mask = words[0] & (of.whole if allowed is None else allowed)
        self.spent = self._matcher.is_completed() and not (self.mask & ~of.ends).any()
