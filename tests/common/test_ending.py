"""A task that keeps its first cancellation to itself ends all the same."""

import asyncio
import contextlib

from services.common.rpc import ending


async def test_a_cancellation_that_was_swallowed_is_repeated(monkeypatch):
    monkeypatch.setattr(ending, "AGAIN_S", 0.01)

    async def deaf_once():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        await asyncio.Event().wait()

    task = asyncio.create_task(deaf_once())
    await asyncio.sleep(0)
    async with asyncio.timeout(20):
        await ending.ended(task)
    assert task.cancelled()
    await ending.ended(task)
