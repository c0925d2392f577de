"""`OpenRequests`: the requests of an engine from arrival to release, with their counts."""

from collections.abc import Iterator

from services.engine.core.deadlines import Deadlines
from services.engine.scheduling.sequence import Request


class OpenRequests:
    """Requests by key. One is waiting until its first admission, and open until its last choice
    ends; it is kept until its last block is released."""

    def __init__(self) -> None:
        self._by_key: dict[str, Request] = {}
        self._deadlines = Deadlines()
        self._num_open = 0
        self._num_waiting = 0

    def __len__(self) -> int:
        return len(self._by_key)

    def __contains__(self, request_key: str) -> bool:
        return request_key in self._by_key

    @property
    def num_waiting(self) -> int:
        """Open requests that have not been admitted."""
        return self._num_waiting

    @property
    def num_running(self) -> int:
        """Open requests that have been admitted, preempted ones included."""
        return self._num_open - self._num_waiting

    @property
    def num_deadlines(self) -> int:
        """Deadlines kept; those of ended requests are dropped from time to time."""
        return len(self._deadlines)

    def find_open(self, request_key: str) -> Request | None:
        """The request with this key, unless all its choices have ended."""
        request = self._by_key.get(request_key)
        return request if request is not None and request.open_choices else None

    def add(self, request: Request) -> None:
        """Add a new request; it waits."""
        self._by_key[request.key] = request
        self._num_open += 1
        self._num_waiting += 1
        self._deadlines.watch(request, self._num_open)

    def admit(self, request: Request, num_cached_tokens: int) -> None:
        """Record a request's first admission."""
        request.admit(num_cached_tokens)
        self._num_waiting -= 1

    def close(self, request: Request) -> None:
        """Record that a request's last choice has ended."""
        self._num_open -= 1
        if not request.admitted:
            self._num_waiting -= 1

    def release(self, request: Request) -> None:
        """Remove a request whose last block is released."""
        del self._by_key[request.key]

    def expired(self, now_s: float) -> Iterator[Request]:
        """Open requests whose deadline has passed; each is returned once.

        Args:
            now_s: Unix time.
        """
        return self._deadlines.passed(now_s)

    def check_integrity(self) -> None:
        """Check the counts.

        Raises:
            AssertionError: naming what does not agree.
        """
        open_requests = [r for r in self._by_key.values() if r.open_choices]
        assert len(open_requests) == self._num_open, "open requests are miscounted"
        waiting = sum(not r.admitted for r in open_requests)
        assert waiting == self._num_waiting, "waiting requests are miscounted"
        for request in self._by_key.values():
            assert request.unreleased_choices > 0, f"{request.key} was released but is kept"
