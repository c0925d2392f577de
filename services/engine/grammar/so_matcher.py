"""`SOMatcher`: one sequence's state in its grammar, and the token ids that may follow.

`Preload` imports xgrammar when the engine starts; without it, the first grammar does.
"""

import logging
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from services.engine.grammar.library import load_library
from services.engine.grammar.wire import Ready, Setup

log = logging.getLogger(__name__)

SLOW_TOKEN_S = 0.05
"""CPU seconds that matching one token may take; an ambiguous grammar takes ever more."""


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


@dataclass(frozen=True, slots=True)
class Grammar:
    """A compiled grammar, shared by all requests with the same constraint."""

    compiled: Any
    masks: TokenMasks
    num_bytes: int

    def matcher(self) -> "SOMatcher":
        """A matcher at the start of the grammar."""
        return SOMatcher(self)


class Preload:
    """Imports xgrammar on a thread, before requests come: the import blocks other threads."""

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
        except (ImportError, OSError) as error:  # a request with a constraint gets an error later
            log.warning(
                "requests with a constraint will fail, xgrammar cannot be loaded: %s", error
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

    def load(self, serialized: str, ready: Ready) -> Grammar:
        """Deserialize a grammar.

        Args:
            ready: the compiler's first message.
        """
        self._info = self._info or self._make_info(self._setup, ready)
        self._masks = self._masks or TokenMasks.of(self._setup, ready)
        compiled = self._deserialize(serialized, self._info)
        return Grammar(compiled, self._masks, len(serialized))


class SOMatcher:
    """The state of one sequence in its grammar; advanced by each sampled token.

    A mask has one bit per token id, 1 for allowed: 32 ids per int32, the lowest bit first.
    """

    def __init__(self, grammar: Grammar) -> None:
        import xgrammar

        self._grammar = grammar
        self._matcher = xgrammar.GrammarMatcher(grammar.compiled)
        self._last_token: int | None = None
        self.mask: NDArray[np.int32] | None = None
        """int32 [ceil(vocabulary / 32)] of the ids allowed next, or None if all are. The array is
        never written again. Without any bit, no token can follow."""
        self.must_end = False
        """Whether the answer is complete and only its end can follow."""
        self.slow = False
        """Whether matching a token took longer than `SLOW_TOKEN_S`."""
        self._update_mask()

    def accept(self, token_id: int) -> bool:
        """Advance by a sampled token; returns False if the grammar does not allow it."""
        return self.replay((token_id,))

    def replay(self, token_ids: Sequence[int]) -> bool:
        """Advance by several tokens; returns False if the grammar does not allow them."""
        began = time.thread_time()
        if not all(self._matcher.accept_token(token_id) for token_id in token_ids):
            return False
        if token_ids:
            self._last_token = token_ids[-1]
        self._update_mask()
        took_s = time.thread_time() - began
        self.slow = self.slow or took_s > SLOW_TOKEN_S * max(1, len(token_ids))
        return True

    def _update_mask(self) -> None:
        masks = self._grammar.masks
        words = np.full((1, masks.num_words), -1, dtype=np.int32)
        if self._matcher.is_terminated():
            self.must_end, self.mask = True, np.zeros_like(words[0])
            return
        narrowed = self._matcher.fill_next_token_bitmask(words)
        allowed = None if self._last_token is None else masks.valid_after.get(self._last_token)
        if not narrowed and allowed is None:
            self.must_end, self.mask = False, None
            return
        self.mask = words[0] & (masks.valid if allowed is None else allowed)
        completed = self._matcher.is_completed()
        self.must_end = completed and not (self.mask & ~masks.end_tokens).any()
