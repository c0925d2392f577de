"""Waits for the end of a process that is not a child of this one."""

import asyncio
import os
import sys

POLL_S = 0.5


async def wait_ended(pid: int) -> None:
    """Wait until the process has ended; returns at once if it does not exist."""
    if sys.platform == "linux":
        await _wait_by_handle(pid)
        return
    while _exists(pid):  # noqa: ASYNC110 - no notification exists here
        await asyncio.sleep(POLL_S)


async def _wait_by_handle(pid: int) -> None:
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    loop = asyncio.get_running_loop()
    over = asyncio.Event()
    loop.add_reader(handle, over.set)
    try:
        await over.wait()
    finally:
        loop.remove_reader(handle)
        os.close(handle)


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
