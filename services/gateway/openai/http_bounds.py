"""Bounds of what one HTTP connection, and all of them together, may send before it is answered."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

MAX_HEADERS = 256
OPEN_HEAD_BYTES = 16 * 1024 * 1024


@dataclass(frozen=True)
class HttpBounds:
    """The bounds of the HTTP face; times in seconds."""

    head_bytes: int = 64 * 1024
    """Of one head, and of what follows a body (chunk extensions, trailers)."""
    head_s: float = 10.0
    """From the first byte of a head to its end."""
    idle_s: float = 75.0
    """A connection without a request is closed after this time."""
    body_silence_s: float = 30.0
    """Between two parts of a body."""
    body_s: float = 300.0
    """From the end of a head to the end of its body."""
    linger_s: float = 1.0
    """For a refused client to read its answer: closing while it sends would reset the
    connection before that."""
    open_heads: int = 1024
    """Unfinished heads of all connections, and connections that have sent nothing yet."""
    open_body_bytes: int = 256 * 1024 * 1024
    """Of the requests of all connections whose bodies are incomplete."""


class Connection(Protocol):
    """A connection with an unfinished head or body."""

    def evict(self) -> None:
        """Refuse the head or body at once, because there are too many."""


@dataclass
class HttpLoad:
    """What all connections of one server hold; owned by the event loop."""

    bounds: HttpBounds
    on_refused: Callable[[int], None] = lambda status: None
    """Called with the status of each refusal."""
    body_bytes: int = 0
    """Of incomplete bodies."""
    _bodies: dict[Connection, int] = field(default_factory=dict)
    """The bytes of each incomplete body, oldest first."""
    _heads: dict[Connection, int] = field(default_factory=dict)
    """The bytes of each open head, oldest first."""
    _head_bytes: int = 0

    def __len__(self) -> int:
        """How many heads are open."""
        return len(self._heads)

    def hold_head(self, head: Connection, size: int) -> None:
        """Record an open head of `size` bytes; evicts the oldest ones beyond the bounds.

        The oldest, because a real client sends its head within milliseconds: whoever holds heads
        open on purpose loses his own, and nobody else is refused.
        """
        self._head_bytes += size - self._heads.get(head, 0)
        self._heads[head] = size
        while len(self._heads) > self.bounds.open_heads or self._head_bytes > OPEN_HEAD_BYTES:
            oldest = next(iter(self._heads))
            self.end_head(oldest)
            oldest.evict()

    def end_head(self, head: Connection) -> None:
        """Forget a head that is complete, refused or gone; idempotent."""
        self._head_bytes -= self._heads.pop(head, 0)

    def hold_body(self, body: Connection, size: int) -> None:
        """Record `size` bytes of an incomplete body; evicts the oldest ones beyond the bound."""
        self.body_bytes += size - self._bodies.get(body, 0)
        self._bodies[body] = size
        while self.body_bytes > self.bounds.open_body_bytes:
            oldest = next(iter(self._bodies))
            self.end_body(oldest)
            oldest.evict()

    def end_body(self, body: Connection) -> None:
        """Forget a body that is complete, refused or gone; idempotent."""
        self.body_bytes -= self._bodies.pop(body, 0)
