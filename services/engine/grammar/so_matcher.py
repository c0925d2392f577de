"""`SOMatcher`: one sequence's state in its grammar, and the token ids that may follow.

`Preload` imports the grammar engines when the engine starts; without it, the first grammar does.
"""

import importlib
import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from services.engine.grammar.library import load_library
from services.engine.grammar.schema_plan import LLGUIDANCE
from services.engine.grammar.strict_engine import StrictCompiler, StrictState
from services.engine.grammar.wire import Outcome, Ready, Setup

log = logging.getLogger(__name__)

SLOW_TOKEN_S = 0.05
"""CPU seconds that matching one token may take; an ambiguous grammar takes ever more. One token
alone may take longer, since Python may collect its garbage within it."""
_FAR_TOO_SLOW = 10
"""So many times the limit is too long for one token too."""


_STRICT_BYTES = 64 << 10
"""Least size to count for a grammar of llguidance: its automaton grows while it is used."""


@dataclass(frozen=True, slots=True)
class TokenMasks:
    """Masks of one vocabulary, with one bit per token id."""

    num_words: int
    """int32 words per mask."""
    end_tokens: NDArray[np.int32]
    """Tokens that end a complete answer."""
    valid: NDArray[np.int32]
    """All tokens except those whose bytes are in no valid UTF-8."""
    valid_after: Mapping[int, NDArray[np.int32]]
    """By a token that ends within a character: the tokens that can validly follow it."""

    @classmethod
    def of(cls, setup: Setup, ready: Ready) -> "TokenMasks":
        """Make the masks from the compiler's description of the vocabulary."""
        size = setup.vocab_size
        num_words = -(-size // 32)

        def mask_of(ids: Iterable[int]) -> NDArray[np.int32]:
            bits = np.zeros(num_words * 32, dtype=np.uint8)
            bits[[i for i in ids if i < size]] = 1
            return np.packbits(bits, bitorder="little").view(np.int32)

        valid = ~mask_of(ready.broken)
        valid_after = {}
        for lead, token_ids in ready.pending.items():
            allowed = valid & ~mask_of(ready.breaking[lead])
            valid_after.update(dict.fromkeys(token_ids, allowed))
        return cls(num_words, mask_of(setup.eos_token_ids), valid, valid_after)


class MatcherState(Protocol):
    """One sequence's state in an engine's grammar."""

    def accept(self, token_id: int) -> bool:
        """Advance by one token; False if it is not allowed."""

    def fill(self, words: NDArray[np.int32]) -> bool:
        """Write the mask of the next token, int32 [1, n]; returns whether it forbids any."""

    @property
    def has_ended(self) -> bool:
        """Whether an end token was accepted."""

    @property
    def is_complete(self) -> bool:
        """Whether the text is a complete answer."""

    @property
    def has_failed(self) -> bool:
        """Whether the engine gave up at one of its limits."""

    def rollback(self, count: int) -> bool:
        """Take back the last tokens; False if that is impossible."""

    def forced(self) -> bytes:
        """The bytes that must follow."""


class XGrammarState:
    """One sequence's state in a grammar of xgrammar."""

    has_failed = False

    def __init__(self, compiled: Any) -> None:
        import xgrammar

        self._matcher = xgrammar.GrammarMatcher(compiled)
        self.accept = self._matcher.accept_token
        self.fill = self._matcher.fill_next_token_bitmask

    @property
    def has_ended(self) -> bool:
        """Whether an end token was accepted."""
        return bool(self._matcher.is_terminated())

    @property
    def is_complete(self) -> bool:
        """Whether the text is a complete answer."""
        return bool(self._matcher.is_completed())

    def rollback(self, count: int) -> bool:
        """Take back the last tokens; False if that is impossible."""
        self._matcher.rollback(count)
        return True

    def forced(self) -> bytes:
        """The bytes that must follow."""
        return str(self._matcher.find_jump_forward_string()).encode()


@dataclass(frozen=True, slots=True)
class Grammar:
    """A compiled grammar, shared by all requests with the same constraint."""

    start: Callable[[], MatcherState]
    """Makes a state at the start of the grammar."""
    masks: TokenMasks
    num_bytes: int
    backend: str = "xgrammar"

    def matcher(self) -> "SOMatcher":
        """A matcher at the start of the grammar."""
        return SOMatcher(self)


class Preload:
    """Imports the grammar engines on a thread before requests come: it blocks other threads."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin the import, once."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._load, name="grammar-preload", daemon=True)
            self._thread.start()

    def join(self) -> None:
        """Wait for the end of the import, if it was begun."""
        if self._thread is not None:
            self._thread.join()

    @staticmethod
    def _load() -> None:
        try:
            load_library()
            importlib.import_module("llguidance")
        except (ImportError, OSError) as error:  # a request with a constraint gets an error later
            log.warning(
                "requests with a constraint will fail, a grammar engine cannot be loaded: %s", error
            )


class GrammarLoader:
    """Loads grammars that the compiler's process made; imports xgrammar when constructed."""

    def __init__(self, setup: Setup) -> None:
        import xgrammar

        from services.engine.grammar.compiler_main import tokenizer_info

        self._setup = setup
        self._make_info = tokenizer_info
        self._deserialize = xgrammar.CompiledGrammar.deserialize_json
        self._info: Any = None
        self._masks: TokenMasks | None = None
        self._strict: StrictCompiler | None = None

    def load(self, outcome: Outcome, ready: Ready) -> Grammar:
        """Load the grammar of an outcome.

        Args:
            ready: the compiler's first message.
        """
        serialized = outcome.grammar or ""
        self._masks = self._masks or TokenMasks.of(self._setup, ready)
        if outcome.backend == LLGUIDANCE:
            return self._load_strict(serialized, ready, self._masks)
        self._info = self._info or self._make_info(self._setup, ready)
        compiled = self._deserialize(serialized, self._info)
        return Grammar(lambda: XGrammarState(compiled), self._masks, len(serialized))

    def _load_strict(self, grammar: str, ready: Ready, masks: TokenMasks) -> Grammar:
        self._strict = self._strict or StrictCompiler(self._setup, ready)
        first = self._strict.start(grammar)
        end_ids = tuple(self._setup.eos_token_ids)
        size = max(len(grammar), _STRICT_BYTES)
        return Grammar(lambda: StrictState(first, end_ids), masks, size, LLGUIDANCE)


class SOMatcher:
    """The state of one sequence in its grammar; advanced by each sampled token.

    A mask has one bit per token id, 1 for allowed: 32 ids per int32, the lowest bit first.
    """

    def __init__(self, grammar: Grammar) -> None:
        self._grammar = grammar
        self._state = grammar.start()
        self._tokens: list[int] = []
        self.mask: NDArray[np.int32] | None = None
        """int32 [ceil(vocabulary / 32)] of the ids allowed next, or None if all are. The array is
        never written again. Without any bit, no token can follow."""
        self.must_end = False
        """Whether the answer is complete and only its end can follow."""
        self._late = False
        self.slow = False
        """Whether two tokens in a row took longer than `SLOW_TOKEN_S`, one took far longer, or one
        needs more than the engine's limits."""
        self._update_mask()

    def accept(self, token_id: int) -> bool:
        """Advance by a sampled token; returns False if the grammar does not allow it."""
        return self.replay((token_id,))

    def replay(self, token_ids: Sequence[int]) -> bool:
        """Advance by several tokens; returns False if the grammar does not allow them."""
        began = time.thread_time()
        accept = self._state.accept
        if not all(accept(token_id) for token_id in token_ids):
            return False
        self._tokens += token_ids
        self._update_mask()
        took = (time.thread_time() - began) / (SLOW_TOKEN_S * max(1, len(token_ids)))
        was_late, self._late = self._late, took > 1
        self.slow = self.slow or (self._late and was_late) or took > _FAR_TOO_SLOW
        return True

    def rollback(self, count: int) -> bool:
        """Take back the last `count` tokens; returns False if there are fewer."""
        if not 0 <= count <= len(self._tokens) or not self._state.rollback(count):
            return False
        del self._tokens[len(self._tokens) - count :]
        self._update_mask()
        return True

    def forced(self) -> bytes:
        """The bytes with which every answer continues; empty if several can follow."""
        return b"" if self._state.has_ended else self._state.forced()

    def _update_mask(self) -> None:
        masks = self._grammar.masks
        words = np.full((1, masks.num_words), -1, dtype=np.int32)
        state = self._state
        if state.has_ended or state.has_failed:
            self.must_end, self.mask = state.has_ended, np.zeros_like(words[0])
            self.slow = self.slow or state.has_failed
            return
        narrowed = state.fill(words)
        last_token = self._tokens[-1] if self._tokens else None
        allowed = None if last_token is None else masks.valid_after.get(last_token)
        if not narrowed and allowed is None:
            self.must_end, self.mask = False, None
            return
        self.mask = words[0] & (masks.valid if allowed is None else allowed)
        if state.has_failed:
            self.slow, self.mask = True, np.zeros_like(words[0])
        self.must_end = state.is_complete and not (self.mask & ~masks.end_tokens).any()
