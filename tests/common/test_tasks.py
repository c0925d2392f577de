"""Ending tasks: by repeated cancellation, or by interrupting a wait."""

import asyncio
import contextlib

import pytest

from services.common import tasks
from services.common.tasks import Interruption, cancel_and_wait, cancel_requested


async def test_a_cancellation_that_was_swallowed_is_repeated(monkeypatch):
    monkeypatch.setattr(tasks, "CANCEL_AGAIN_S", 0.01)

    async def swallow_once():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        await asyncio.Event().wait()

    stubborn, quick = (asyncio.create_task(work) for work in (swallow_once(), asyncio.sleep(60)))
    await asyncio.sleep(0)
    async with asyncio.timeout(20):
        await cancel_and_wait(stubborn, quick)
    assert stubborn.cancelled()
    assert quick.cancelled()
    await cancel_and_wait(stubborn)


async def test_the_error_of_a_task_that_fails_while_it_ends_is_not_raised():
    async def fail_at_the_end():
        try:
            await asyncio.Event().wait()
        finally:
            raise ValueError

    task = asyncio.create_task(fail_at_the_end())
    await asyncio.sleep(0)
    await cancel_and_wait(task)
    assert isinstance(task.exception(), ValueError)


async def test_a_requested_cancellation_is_told_from_one_that_a_call_raised():
    assert not cancel_requested()
    with pytest.raises(asyncio.CancelledError):
        raise asyncio.CancelledError
    assert not cancel_requested()
    tasks.raise_if_cancelled()

    async def swallow():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        assert cancel_requested()
        tasks.raise_if_cancelled()

    task = asyncio.create_task(swallow())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_timeout_that_passed_is_no_cancellation():
    try:
        async with asyncio.timeout(0.01):
            await asyncio.sleep(30)
    except TimeoutError:
        tasks.raise_if_cancelled()


async def test_a_wait_is_ended_and_the_task_is_not_cancelled():
    interruption = Interruption()
    asyncio.get_running_loop().call_soon(interruption.request)
    with pytest.raises(TimeoutError):
        async with interruption.waiting(60):
            await asyncio.Event().wait()
    assert asyncio.current_task().cancelling() == 0


async def test_a_wait_that_ends_at_the_same_moment_is_ended_too():
    interruption = Interruption()

    async def work():
        async with interruption.waiting():
            assert interruption.request()
            assert interruption.request(), "a second time is no error"

    with pytest.raises(TimeoutError):
        await work()


async def test_once_requested_no_wait_begins():
    interruption = Interruption()
    assert not interruption.request()
    with pytest.raises(TimeoutError):
        async with interruption.waiting():
            pytest.fail("not reached")
