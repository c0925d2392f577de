"""Ending one piece of work from outside with an error of ours, not by cancelling its task."""

import asyncio
import contextlib
from collections.abc import AsyncIterator


class Interruption:
    """Owned by the work; `now` may be called by anyone on its loop, and more than once."""

    def __init__(self) -> None:
        self._wait: asyncio.Timeout | None = None
        self.told = False
        """Whether the work is to end."""

    def now(self) -> bool:
        """End the wait that the work is in; returns False if it is in none."""
        self.told = True
        if self._wait is None:
            return False
        if not self._wait.expired():
            self._wait.reschedule(0)
        return True

    @contextlib.asynccontextmanager
    async def waiting(self, timeout_s: float | None = None) -> AsyncIterator[None]:
        """A wait that can be ended.

        Raises:
            TimeoutError: it was, or took longer than `timeout_s`.
        """
        if self.told:
            raise TimeoutError
        try:
            async with asyncio.timeout(timeout_s) as self._wait:
                yield
            if self.told:  # both at the same moment
                raise TimeoutError
        finally:
            self._wait = None
