"""Ending a wait from outside."""

import asyncio

import pytest

from services.common.rpc.interruption import Interruption


async def test_a_wait_is_ended_and_the_task_is_not_cancelled():
    interruption = Interruption()
    asyncio.get_running_loop().call_soon(interruption.now)
    with pytest.raises(TimeoutError):
        async with interruption.waiting(60):
            await asyncio.Event().wait()
    assert asyncio.current_task().cancelling() == 0


async def test_a_wait_that_ends_at_the_same_moment_is_ended_too():
    interruption = Interruption()

    async def work():
        async with interruption.waiting():
            assert interruption.now()
            assert interruption.now(), "a second time is no error"

    with pytest.raises(TimeoutError):
        await work()


async def test_once_told_no_wait_begins():
    interruption = Interruption()
    assert not interruption.now()
    with pytest.raises(TimeoutError):
        async with interruption.waiting():
            pytest.fail("not reached")
