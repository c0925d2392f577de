"""Version n beside n-1: an earlier revision's fleet is replaced service by service under load."""

import signal
import subprocess
import tarfile
import time
from io import BytesIO
from pathlib import Path

from tests.chaos.fleet import REPOSITORY
from tests.chaos.scenario import Row, Stage

PREVIOUS = "9b397ae623e5849d89921babd2a6c3d3c3d9da15"
"""The last revision of 0.1.0; moves on with every release."""
NEW_KEYS: tuple[str, ...] = ("trust_unproven",)
"""Keys of ours that it does not know."""
SETTINGS = {
    kind: {"trust_unproven": "yes"} for kind in ("kvcache", "balancer", "engine", "gateway")
}
"""What docs/deployment.md says for the time of the upgrade."""


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
    """Gateways, then half of each kind, then all, and a gateway back: each old meets each new."""
    row = Row("version n beside n-1", needs_continuations=True)
    names = list(stage.fleet.children)
    # The version before ends a stream when its balancer drains: its gateways have to go first.
    gateways = [name for name in names if name.startswith("gateway")]
    half = [name for name in names if name.endswith("-1") and name not in gateways]
    rest = [name for name in names if name not in gateways and name not in half]
    old = stage.fleet.shape.code[gateways[-1]]
    stage.clients.may_break = lambda _, begun: not begun
    async with stage.under_load(row):
        await _replace(stage, row, gateways)
        await _replace(stage, row, half)
        await _kill_both(stage, row)  # a new engine's streams go on at an old one, and back
        await _replace(stage, row, rest)
        await _replace(stage, row, gateways[-1:], old)
        await _kill_both(stage, row)
        await _replace(stage, row, gateways[-1:])
    stage.clients.may_break = lambda _, __: False
    return [row]


async def _kill_both(stage: Stage, row: Row) -> None:
    for name in ("engine-1", "engine-2"):
        await stage.flowing(stage.plan.streams // 2)
        since = time.monotonic()
        stage.fleet.signal(name, signal.SIGKILL)
        await stage.heal(row, since)
        await stage.whole_again(row, since)


async def _replace(stage: Stage, row: Row, names: list[str], code: Path = REPOSITORY) -> None:
    for name in names:
        since = time.monotonic()
        seconds = await stage.fleet.restart(name, code)
        stage.say(f"  {name} replaced in {seconds:.1f} s")
        row.rounds += 1
        await stage.whole_again(row, since)
        await stage.heal(row, time.monotonic())
