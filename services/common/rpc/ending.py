"""The end of a task that goes on for ever."""

import asyncio
from typing import Any

AGAIN_S = 1.0


async def ended(task: "asyncio.Task[Any]") -> None:
    """Cancel a task and return once it has ended.

    More than once if need be: a client library that is just giving a connection up may keep a
    cancellation to itself, and the loop around it would go on.
    """
    while not task.done():
        task.cancel()
        await asyncio.wait({task}, timeout=AGAIN_S)
