"""Structured output: compiles grammars in the background and masks the tokens of one sequence.

`SOMatcherBuilder` takes constraints; the core's loop polls it for grammars or failures. A failure
is a value that ends one request, never an exception. `SOMatcher` is one sequence's state in its
grammar. The compiler runs in a process of its own and is killed when it exceeds its time.
Nothing is loaded or started before the first constraint.
"""

import hashlib
import logging
import queue
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from services.engine.contract.sampling_params import Constraint
from services.engine.grammar.compiler import GrammarCompiler
from services.engine.grammar.so_matcher import Grammar, GrammarLoader, SOMatcher
from services.engine.grammar.wire import INVALID, TOO_COSTLY, UNAVAILABLE, Setup

__all__ = ["INVALID", "TOO_COSTLY", "UNAVAILABLE", "Built", "SOMatcher", "SOMatcherBuilder"]

log = logging.getLogger(__name__)

IDLE_S = 600.0
"""Seconds without a job after which the compiler's process ends; the next job starts it again."""
CACHED_BYTES = 256 << 20
"""Limit of the serialized size of all cached grammars."""


@dataclass(frozen=True, slots=True)
class Built:
    """The grammar of a request's constraint, or why it has none."""

    request_key: str
    grammar: Grammar | None
    problem: str | None = None
    reason: str = INVALID
    """With a problem: INVALID, TOO_COSTLY or UNAVAILABLE."""

    @property
    def num_bytes(self) -> int:
        """Bytes that caching it takes."""
        return self.grammar.num_bytes if self.grammar is not None else 0


@dataclass(slots=True)
class _Pending:
    digest: bytes
    constraint: Constraint
    keys: list[str] = field(default_factory=list)
    """Requests that wait for it. If all are cancelled before it begins, it is skipped."""


class SOMatcherBuilder:
    """Compiles constraints in the background, once per content; the core's loop polls it."""

    def __init__(
        self,
        setup: Setup,
        *,
        timeout_s: float = 8.0,
        cached: int = 128,
        keep: bool = False,
        on_done: Callable[[], None] | None = None,
    ) -> None:
        """Start the thread.

        Args:
            setup: the model's vocabulary; read before the first compilation.
            timeout_s: limit of one compilation.
            cached: number of outcomes to cache.
            keep: whether the compiler's process stays when it is idle.
            on_done: called on the thread when `pump` has something.
        """
        self._setup = setup
        self._on_done = on_done
        self._compiler = GrammarCompiler(setup, timeout_s=timeout_s)
        self._cached = cached
        self._idle_s = None if keep else IDLE_S
        self._grammars: OrderedDict[bytes, Built] = OrderedDict()
        self._cached_bytes = 0
        self._waiting: dict[bytes, _Pending] = {}
        self._ready: list[Built] = []
        self._jobs: queue.SimpleQueue[_Pending | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[tuple[_Pending, Built | None]] = queue.SimpleQueue()
        self._done_event = threading.Event()
        self._thread = threading.Thread(target=self._compile_jobs, name="grammar", daemon=True)
        self._thread.start()

    def submit(self, request_key: str, constraint: Constraint) -> None:
        """Request a grammar; `pump` returns it later. Equal constraints share one compilation."""
        digest = _digest(constraint)
        known = self._grammars.get(digest)
        if known is not None:
            self._grammars.move_to_end(digest)
            self._ready.append(Built(request_key, known.grammar, known.problem, known.reason))
        elif digest in self._waiting:
            self._waiting[digest].keys.append(request_key)
        else:
            pending = self._waiting[digest] = _Pending(digest, constraint, [request_key])
            self._jobs.put(pending)

    def pump(self) -> list[Built]:
        """Return what became ready since the last call; never blocks."""
        self._done_event.clear()
        while True:
            try:
                pending, built = self._done.get_nowait()
            except queue.Empty:
                break
            if built is None and pending.keys:  # requested again after it was skipped
                self._jobs.put(pending)
                continue
            del self._waiting[pending.digest]
            if built is not None:
                self._cache(pending.digest, built)
                self._ready += [
                    Built(key, built.grammar, built.problem, built.reason) for key in pending.keys
                ]
        ready, self._ready = self._ready, []
        return ready

    def wait(self, timeout_s: float) -> None:
        """Wait until `pump` has something, or for the timeout."""
        if not self._ready:
            self._done_event.wait(timeout_s)

    def cancel(self, request_key: str) -> None:
        """Forget a request that waits; a running compilation continues for others and the cache."""
        for pending in self._waiting.values():
            if request_key in pending.keys:
                pending.keys.remove(request_key)
        self._ready = [built for built in self._ready if built.request_key != request_key]

    @property
    def num_pending(self) -> int:
        """Requests that wait for a grammar."""
        return sum(len(p.keys) for p in self._waiting.values()) + len(self._ready)

    def close(self) -> None:
        """Stop the thread and the compiler's process; idempotent."""
        self._jobs.put(None)
        self._compiler.close()
        self._thread.join(timeout=1)

    def _cache(self, digest: bytes, built: Built) -> None:
        if built.reason == UNAVAILABLE:
            return  # the constraint is not the cause: the next request tries again
        self._grammars[digest] = built
        self._cached_bytes += built.num_bytes
        while len(self._grammars) > self._cached or self._cached_bytes > CACHED_BYTES:
            _, dropped = self._grammars.popitem(last=False)
            self._cached_bytes -= dropped.num_bytes

    def _compile_jobs(self) -> None:
        loader: GrammarLoader | None = None
        while True:
            try:
                pending = self._jobs.get(timeout=self._idle_s)
            except queue.Empty:
                self._compiler.stop()
                continue
            if pending is None:
                return
            built = None
            if pending.keys:
                loader, built = self._build(loader, pending.constraint)
            self._done.put((pending, built))
            self._done_event.set()
            if self._on_done is not None:
                self._on_done()

    def _build(
        self, loader: GrammarLoader | None, constraint: Constraint
    ) -> tuple[GrammarLoader | None, Built]:
        """Compile on the thread; any exception must end one request only."""
        try:
            self._compiler.prepare()  # it loads its libraries while this thread loads them too
            loader = loader or GrammarLoader(self._setup)
            outcome = self._compiler.compile(constraint)
            if outcome.grammar is None or self._compiler.ready is None:
                return loader, Built("", None, outcome.problem, outcome.reason)
            return loader, Built("", loader.load(outcome, self._compiler.ready))
        except Exception:
            log.exception("a constraint of kind %s could not be compiled", constraint.kind)
            problem = "the grammar compiler is not available"
            return loader, Built("", None, problem, UNAVAILABLE)


def _digest(constraint: Constraint) -> bytes:
    parts = (constraint.kind, constraint.text, *constraint.choices)
    return hashlib.sha256(b"".join(f"{len(p)}:{p}".encode() for p in parts)).digest()
