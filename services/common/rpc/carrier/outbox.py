"""The writing end of a carrier, on either side: one message at a time, of all that has gathered."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

# What is gathered beyond it goes with the next message; one that is longer goes alone.
BATCH_BYTES = 256 * 1024


class Outbox:
    """Asks for frames when told that there are some, and writes them.

    Args:
        collect: takes what has gathered, None for nothing.
        write: of the call.
    """

    def __init__(
        self, collect: Callable[[], Any | None], write: Callable[[Any], Awaitable[None]]
    ) -> None:
        self._collect = collect
        self._write = write
        self._news = asyncio.Event()
        self._finishing = False
        self._waiting: list[asyncio.Future[None]] = []
        self.busy = False
        """Whether a message is being written now, so that the next one waits."""

    def notify(self) -> None:
        """There is something to write."""
        self._news.set()

    def finish(self) -> None:
        """Write what is there, then end."""
        self._finishing = True
        self._news.set()

    async def collected(self) -> None:
        """Wait until what has gathered by now is being written."""
        future = asyncio.get_running_loop().create_future()
        self._waiting.append(future)
        await future

    async def run(self) -> None:
        """Until finished.

        Raises:
            Exception: whatever `write` raises.
        """
        try:
            while True:
                await self._news.wait()
                self._news.clear()
                self.busy = True
                while (frames := self._collect()) is not None:
                    self._release()
                    await self._write(frames)
                self.busy = False
                self._release()  # whoever waits for what went with the last one
                if self._finishing:
                    return
        finally:
            self.busy = False
            self._release()

    def _release(self) -> None:
        waiting, self._waiting = self._waiting, []
        for future in waiting:
            if not future.done():
                future.set_result(None)
