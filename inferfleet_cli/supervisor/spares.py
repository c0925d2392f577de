"""Engines that stand by: loaded, but registered only once they take the place of one that ended."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from inferfleet_cli.supervisor.child import ChildStatus

POLL_S = 0.05


class Engine(Protocol):
    """What is needed of a Child."""

    name: str

    def status(self) -> ChildStatus:
        """The state of its process."""


class Spares:
    """Keeps a number of engines in use; an engine is in use while its file exists.

    Args:
        engines: those in use and the spares.
        files: by name, the key `standby_file` of each engine.
        in_use: how many are in use.
        say: gets a line when a spare takes over.
    """

    def __init__(
        self,
        engines: Sequence[Engine],
        files: Mapping[str, Path],
        in_use: int,
        say: Callable[[str], None],
    ) -> None:
        self._engines = engines
        self._files = files
        self._say = say
        self._in_use = {engine.name for engine in engines[:in_use]}
        for name in self._in_use:
            files[name].touch()

    def is_spare(self, name: str) -> bool:
        """Whether the engine stands by."""
        return name in self._files and name not in self._in_use

    async def follow(self) -> None:
        """Replace engines that end, until cancelled."""
        while True:
            self.replace_ended()
            await asyncio.sleep(POLL_S)

    def replace_ended(self) -> None:
        """Let a spare that is ready take the place of each engine that has ended.

        The one that has ended stands by once it is back. Without a ready spare it stays in use.
        """
        statuses = {engine.name: engine.status() for engine in self._engines}
        for name in sorted(self._in_use):
            spare = next(
                (n for n, s in statuses.items() if n not in self._in_use and s.state == "ready"),
                None,
            )
            if _has_ended(statuses[name]) and spare is not None:
                self._files[name].unlink(missing_ok=True)
                self._files[spare].touch()
                self._in_use = self._in_use - {name} | {spare}
                self._say(f"{spare} takes the place of {name}")


def _has_ended(status: ChildStatus) -> bool:
    """Whether an engine has ended and is not ready again."""
    return status.state == "restarting" or (status.state == "starting" and status.restarts > 0)
