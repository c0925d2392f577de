"""How asyncio tasks are ended: cancelled from outside, or interrupted at one wait with an error."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

CANCEL_AGAIN_S = 1.0


async def cancel_and_wait(*tasks: "asyncio.Task[Any]") -> None:
    """Cancel tasks and return once all of them have ended; their errors are not raised.

    A task that is still running after a second is cancelled again: grpc.aio and redis-py can
    swallow a cancellation while they close a connection, and the loop around them would go on.
    """
    while running := {task for task in tasks if not task.done()}:
        for task in running:
            task.cancel()
        await asyncio.wait(running, timeout=CANCEL_AGAIN_S)


def cancel_requested() -> bool:
    """Whether somebody called `cancel` on the current task.

    It tells the cancellation of this task apart from a CancelledError that an awaited call raised
    on its own: grpc.aio raises one for a closed channel and for the peer's status CANCELLED.
    """
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def raise_if_cancelled() -> None:
    """Raise CancelledError if the current task was cancelled and a call swallowed that.

    A call that fails while its caller is being cancelled may raise its own error instead. A loop
    that retries must check this first, or it never ends.

    Raises:
        CancelledError: `cancel` was called on the current task.
    """
    if cancel_requested():
        raise asyncio.CancelledError


class Interruption:
    """Ends one piece of work from outside with an error at its wait, without cancelling its task.

    Owned by the work. `request` may be called by anything on the same event loop, repeatedly.
    """

    def __init__(self) -> None:
        self._wait: asyncio.Timeout | None = None
        self.requested = False
        """Whether the work is to end."""

    def request(self) -> bool:
        """End the wait that the work is in; returns False if it is in none."""
        self.requested = True
        if self._wait is None:
            return False
        if not self._wait.expired():
            self._wait.reschedule(0)
        return True

    @contextlib.asynccontextmanager
    async def waiting(self, timeout_s: float | None = None) -> AsyncIterator[None]:
        """Wrap a wait that `request` can end.

        Raises:
            TimeoutError: an interruption was requested, or the wait took longer than `timeout_s`.
        """
        if self.requested:
            raise TimeoutError
        try:
            async with asyncio.timeout(timeout_s) as self._wait:
                yield
            if self.requested:  # in the same turn of the loop in which the wait ended
                raise TimeoutError
        finally:
            self._wait = None
