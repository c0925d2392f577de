"""Version n beside n-1: an earlier revision's fleet is replaced service by service under load."""

import asyncio
import signal
import subprocess
import tarfile
import time
from io import BytesIO
from pathlib import Path

from benchmarks.chaos.fleet import REPOSITORY
from benchmarks.chaos.scenario import Row, Stage

PREVIOUS = "2cd7ae3041f36e5bf2a11a7fbf268e28334569d3"
"""The revision before the internal protocol's latest change; moves on with every release."""
NEW_KEYS = ("warm_grammars",)
"""Keys of ours that it does not know."""
_MIXED_S = 5.0


class NoSuchRevisionError(Exception):
    """This checkout does not have it."""


def unpack(revision: str, folder: Path) -> Path:
    """The tree of a revision, in a new folder.

    Raises:
        NoSuchRevisionError: git does not know it, e.g. in a shallow clone.
    """
    done = subprocess.run(
        ["git", "archive", revision], cwd=REPOSITORY, capture_output=True, check=False
    )
    if done.returncode:
        raise NoSuchRevisionError(done.stderr.decode(errors="replace").strip())
    with tarfile.open(fileobj=BytesIO(done.stdout)) as tree:
        tree.extractall(folder, filter="data")
    return folder


async def upgrade(stage: Stage) -> list[Row]:
    """Half of each kind first, so that every pair of old and new meets; a kill in between."""
    row = Row("version n beside n-1", needs_continuations=True)
    names = list(stage.fleet.children)
    first = [name for name in names if name.endswith("-1")]
    stage.clients.may_break = lambda _, begun: not begun
    async with stage.under_load(row):
        await _replace(stage, row, first)
        await asyncio.sleep(_MIXED_S)
        for name in (
            "engine-1",
            "engine-2",
        ):  # a new engine's streams go on at an old one, and back
            since = time.monotonic()
            stage.fleet.signal(name, signal.SIGKILL)
            await stage.heal(row, since)
            await stage.whole_again(row, since)
        await _replace(stage, row, [name for name in names if name not in first])
    stage.clients.may_break = lambda _, __: False
    return [row]


async def _replace(stage: Stage, row: Row, names: list[str]) -> None:
    for name in names:
        since = time.monotonic()
        await stage.fleet.restart(name, REPOSITORY)
        row.rounds += 1
        await stage.whole_again(row, since)
        await stage.heal(row, time.monotonic())
