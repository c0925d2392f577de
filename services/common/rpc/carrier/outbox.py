"""The writing end of a carrier, on either side: writes all pending frames as one message."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

# Frames beyond it go with the next message; a single longer one goes alone.
BATCH_BYTES = 256 * 1024


class Outbox:
    """Collects pending frames whenever it is notified, and writes them.

    Args:
        collect: takes the pending frames as one message; None if there are none.
        write: the call's method.
    """

    def __init__(
        self, collect: Callable[[], Any | None], write: Callable[[Any], Awaitable[None]]
    ) -> None:
        self._collect = collect
        self._write = write
        self._notified = asyncio.Event()
        self._finishing = False
        self._waiting: list[asyncio.Future[None]] = []
        self.busy = False
        """Whether a message is being written, so the next one has to wait."""

    def notify(self) -> None:
        """Announce that frames are pending."""
        self._notified.set()

    def finish(self) -> None:
        """Let `run` write what is pending, then end."""
        self._finishing = True
        self._notified.set()

    async def wait_collected(self) -> None:
        """Wait until the frames that are pending now are being written."""
        future = asyncio.get_running_loop().create_future()
        self._waiting.append(future)
        await future

    async def run(self) -> None:
        """Write until finished.

        Raises:
            Exception: `write` failed.
        """
        try:
            while True:
                await self._notified.wait()
                self._notified.clear()
                self.busy = True
                while (frames := self._collect()) is not None:
                    self._release_waiting()
                    await self._write(frames)
                self.busy = False
                self._release_waiting()  # those whose frames were in the last message
                if self._finishing:
                    return
        finally:
            self.busy = False
            self._release_waiting()

    def _release_waiting(self) -> None:
        waiting, self._waiting = self._waiting, []
        for future in waiting:
            if not future.done():
                future.set_result(None)
