"""Structured output: grammars are compiled off the loop, then narrow each draw of one sequence.

`SOMatcherBuilder` takes constraints and, polled by the loop, hands back grammars or failures; a
failure ends one request and is a value, never an exception. `SOMatcher` is one sequence's place in
its grammar. The compiler runs in a process of its own and is killed when it exceeds its time.
"""

import hashlib
import queue
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import xgrammar

from services.common.errors import InvalidArgumentError
from services.engine.grammar.compiler import GrammarCompiler
from services.engine.grammar.compiler_main import tokenizer_info
from services.engine.grammar.regex_check import regex_problem
from services.engine.grammar.schema_check import SchemaRefusedError, check_schema
from services.engine.grammar.wire import Setup
from services.engine.sampling_params import Constraint

KINDS = ("json_schema", "json_object", "regex", "ebnf", "choice", "structural_tag")
MAX_CONSTRAINT_CHARS = 64 * 1024
MAX_CHOICES = 1000


@dataclass(frozen=True)
class Built:
    """A constraint that is ready, or why it never will be."""

    request_key: str
    grammar: Any | None
    problem: str | None = None


def check_constraint(constraint: Constraint) -> None:
    """Refuse what cannot be enforced, before any queue.

    Raises:
        InvalidArgumentError: naming `constraint.<kind>` and, for a schema, the keyword's path.
    """
    field = f"constraint.{constraint.kind}"
    if constraint.kind not in KINDS:
        raise InvalidArgumentError.for_field("constraint", f"unknown kind {constraint.kind!r}")
    if len(constraint.text) > MAX_CONSTRAINT_CHARS:
        raise InvalidArgumentError.for_field(field, f"has over {MAX_CONSTRAINT_CHARS} characters")
    if constraint.kind == "json_schema":
        try:
            check_schema(constraint.text)
        except SchemaRefusedError as error:
            raise InvalidArgumentError.for_field(
                field, str(error), reason="SCHEMA_NOT_ENFORCEABLE", keyword=error.path
            ) from error
    if constraint.kind == "regex" and (problem := regex_problem(constraint.text)):
        raise InvalidArgumentError.for_field(field, problem)
    if constraint.kind == "choice":
        if not 1 <= len(constraint.choices) <= MAX_CHOICES:
            raise InvalidArgumentError.for_field(field, f"must have 1 to {MAX_CHOICES} texts")
        if not all(constraint.choices):
            raise InvalidArgumentError.for_field(field, "texts must not be empty")


class SOMatcherBuilder:
    """Compiles constraints in the background, once per digest; owned and polled by the loop."""

    def __init__(self, setup: Setup, *, timeout_s: float = 10.0, cached: int = 128) -> None:
        self._info = tokenizer_info(setup)
        self._vocab_size = setup.vocab_size
        self._compiler = GrammarCompiler(setup, timeout_s=timeout_s)
        self._cached = cached
        self._grammars: OrderedDict[bytes, Built] = OrderedDict()
        self._waiting: dict[bytes, list[str]] = {}
        self._ready: list[Built] = []
        self._jobs: queue.SimpleQueue[tuple[bytes, Constraint] | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[tuple[bytes, Built]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="grammar", daemon=True)
        self._thread.start()

    def submit(self, request_key: str, constraint: Constraint) -> None:
        """Ask for a grammar; `pump` returns it later. Equal constraints share one compilation."""
        digest = _digest(constraint)
        known = self._grammars.get(digest)
        if known is not None:
            self._grammars.move_to_end(digest)
            self._ready.append(Built(request_key, known.grammar, known.problem))
        elif digest in self._waiting:
            self._waiting[digest].append(request_key)
        else:
            self._waiting[digest] = [request_key]
            self._jobs.put((digest, constraint))

    def pump(self) -> list[Built]:
        """What became ready since the last call; never blocks."""
        while True:
            try:
                digest, built = self._done.get_nowait()
            except queue.Empty:
                break
            self._grammars[digest] = built
            if len(self._grammars) > self._cached:
                self._grammars.popitem(last=False)
            keys = self._waiting.pop(digest)
            self._ready += [Built(key, built.grammar, built.problem) for key in keys]
        ready, self._ready = self._ready, []
        return ready

    def cancel(self, request_key: str) -> None:
        """Forget a request that is waiting; the compilation goes on for others and the cache."""
        for keys in self._waiting.values():
            if request_key in keys:
                keys.remove(request_key)
        self._ready = [built for built in self._ready if built.request_key != request_key]

    @property
    def num_pending(self) -> int:
        """Requests that wait for a grammar."""
        return sum(len(keys) for keys in self._waiting.values()) + len(self._ready)

    def matcher(self, grammar: Any) -> "SOMatcher":
        """A matcher at the start of a grammar that `pump` returned."""
        return SOMatcher(grammar, self._vocab_size)

    def close(self) -> None:
        """Stop the thread and the compiler's process; idempotent."""
        self._jobs.put(None)
        self._compiler.close()
        self._thread.join(timeout=5)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            digest, constraint = job
            outcome = self._compiler.compile(constraint.kind, constraint.text, constraint.choices)
            grammar, problem = None, outcome.problem
            if outcome.grammar is not None:
                grammar = xgrammar.CompiledGrammar.deserialize_json(outcome.grammar, self._info)
            self._done.put((digest, Built("", grammar, problem)))


class SOMatcher:
    """One sequence's place in its grammar.

    The words of a mask have one bit per token id, 1 for allowed, 32 ids to an int32.
    """

    def __init__(self, grammar: Any, vocab_size: int) -> None:
        self._grammar = grammar
        self._vocab_size = vocab_size
        self._matcher = xgrammar.GrammarMatcher(grammar)

    def accept(self, token_id: int) -> bool:
        """Advance by a drawn token; False if the grammar does not allow it."""
        return bool(self._matcher.accept_token(token_id))

    def mask(self) -> torch.Tensor | None:
        """int32 [ceil(vocab / 32)] of the ids allowed next, or None if all are.

        A mask without a single bit means that the grammar cannot go on.
        """
        words = xgrammar.allocate_token_bitmask(1, self._vocab_size)
        narrowed = self._matcher.fill_next_token_bitmask(words)
        return words[0] if narrowed else None

    @property
    def complete(self) -> bool:
        """Whether the end token has been accepted."""
        return bool(self._matcher.is_terminated())

    def replayed(self, token_ids: Sequence[int]) -> "SOMatcher | None":
        """A fresh matcher after these tokens, or None if they do not fit the grammar."""
        fresh = SOMatcher(self._grammar, self._vocab_size)
        return fresh if all(fresh.accept(token_id) for token_id in token_ids) else None

    def rollback(self, num_tokens: int) -> None:
        """Take back the last accepted tokens (refused drafts)."""
        self._matcher.rollback(num_tokens)


def _digest(constraint: Constraint) -> bytes:
    parts = (constraint.kind, constraint.text, *constraint.choices)
    return hashlib.sha256(b"".join(f"{len(p)}:{p}".encode() for p in parts)).digest()
