"""The tasks that a service runs for as long as it lives."""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from services.common.tasks import cancel_and_wait

log = logging.getLogger(__name__)


class Background:
    """Tasks that must not end while the service runs; the first that does is the service's failure.

    Made inside or outside the event loop, used inside it.

    Args:
        on_failure: called once, on the event loop, with the reason that `failed` returns.
    """

    def __init__(self, on_failure: Callable[[str], None] | None = None) -> None:
        self._on_failure = on_failure
        self._tasks: list[asyncio.Task[None]] = []
        self._failed = asyncio.Event()
        self._reason = ""

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> "asyncio.Task[None]":
        """Run a coroutine until `close`; `name` appears in logs and in the failure's reason."""
        task = asyncio.create_task(work, name=name)
        task.add_done_callback(self._check_ended)
        self._tasks.append(task)
        return task

    async def failed(self) -> str:
        """Return the reason once a task has ended by itself; never returns otherwise."""
        await self._failed.wait()
        return self._reason

    async def close(self) -> None:
        """Cancel all tasks and wait for them, newest first; idempotent."""
        while self._tasks:
            await cancel_and_wait(self._tasks.pop())

    def _check_ended(self, task: "asyncio.Task[None]") -> None:
        if task.cancelled():
            return
        error = task.exception()
        log.critical("background task %s ended", task.get_name(), exc_info=error)
        if self._failed.is_set():
            return
        cause = "it returned" if error is None else repr(error)
        self._reason = f"background task {task.get_name()} ended: {cause}"
        self._failed.set()
        if self._on_failure is not None:
            self._on_failure(self._reason)
