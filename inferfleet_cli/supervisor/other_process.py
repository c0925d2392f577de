"""Waiting for the end of a process that is not our child."""

import asyncio
import os
import sys

POLL_S = 0.5


async def ended(pid: int) -> None:
    """Return when that process has ended; at once if there is none."""
    if sys.platform == "linux":
        await _ended_by_handle(pid)
        return
    while _exists(pid):  # noqa: ASYNC110 - there is nothing to be told by
        await asyncio.sleep(POLL_S)


async def _ended_by_handle(pid: int) -> None:
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
