"""Tasks that must not end while a service runs."""

import asyncio

import pytest

from services.common.service.background import Background


async def fail():
    raise ValueError("no disk")


async def end():
    pass


@pytest.mark.parametrize(("work", "cause"), [(fail, "ValueError('no disk')"), (end, "it returned")])
async def test_the_first_task_that_ends_is_the_failure(work, cause):
    reasons = []
    background = Background(reasons.append)
    other = background.spawn(asyncio.Event().wait(), "other")
    background.spawn(work(), "pump")
    async with asyncio.timeout(20):
        reason = await background.failed()
    assert reason == f"background task pump ended: {cause}"
    assert reasons == [reason]
    background.spawn(fail(), "late")
    await asyncio.sleep(0.01)
    assert await background.failed() == reason
    await background.close()
    assert other.cancelled()


async def test_closing_is_no_failure_and_may_be_repeated():
    background = Background(lambda reason: pytest.fail(reason))
    ended = []

    async def work(name):
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(name)

    tasks = [background.spawn(work(name), name) for name in ("old", "new")]
    await asyncio.sleep(0)
    await background.close()
    await background.close()
    assert ended == ["new", "old"]
    assert all(task.cancelled() for task in tasks)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(background.failed(), 0.01)
