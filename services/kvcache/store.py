"""The index's commands and scripts on Redis; `link` says which Redis and bounds each call."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import redis.asyncio as aioredis

from services.kvcache.link import CALL_TIMEOUT_S, Link, StoreAwayError, StoreSettings

_LUA = Path(__file__).parent / "lua"


class Store:
    """Runs the index's scripts.

    Calls raise StoreAwayError and nothing else because of Redis.
    """

    def __init__(self, settings: StoreSettings) -> None:
        self.entry_prefix = f"{settings.prefix}:b:"
        self.owners_key, self.live_key, self.meta_key = (
            f"{settings.prefix}:{name}" for name in ("owners", "live", "meta")
        )
        self._link = Link(settings)
        # Never connected: scripts want a client to be registered with, and are run on another.
        registry: Any = aioredis.Redis()
        owners = (_LUA / "owners.lua").read_text()
        self._scripts = {
            name: registry.register_script(owners + (_LUA / f"{name}.lua").read_text())
            for name in ("apply", "forget", "touch", "sweep")
        }
        self._scripts["match"] = registry.register_script((_LUA / "match.lua").read_text())

    @property
    def available(self) -> bool:
        """Whether Redis answered when last asked."""
        return self._link.available

    async def start(self) -> None:
        """Look for Redis once, then keep looking in the background.

        Raises:
            UnsuitableStoreError: it answered, and cannot be used. Redis being away is no error.
        """
        await self._link.start()

    async def close(self) -> None:
        """Close all connections; idempotent."""
        await self._link.close()

    async def match(self, hashes: bytes, needs_state: bool, timeout_s: float) -> list[Any]:
        """Flat list of b"<epoch> <engine id>" and matched blocks."""
        if self._link.slow:
            raise StoreAwayError("Redis was too slow for a match and has not answered since")
        arguments = (hashes, int(needs_state), self.entry_prefix)
        reply: list[Any] = await self._run("match", [self.live_key], arguments, timeout_s)
        return reply

    async def script(self, name: str, arguments: Sequence[Any]) -> Any:
        """Run a script that writes; its keys are owners, live and meta."""
        keys = [self.owners_key, self.live_key, self.meta_key]
        return await self._run(name, keys, arguments, CALL_TIMEOUT_S)

    async def owners(self) -> dict[bytes, bytes]:
        """Engine id → raw record, see owners.lua."""
        reply: dict[bytes, bytes] = await self._command("HGETALL", self.owners_key)
        return reply

    async def num_entries(self) -> int:
        """Entries as counted by the scripts; corrected by each sweep."""
        return int(await self._command("HGET", self.meta_key, "entries") or 0)

    async def adjust_entries(self, by: int) -> None:
        """Correct the count for what Redis evicted or expired by itself."""
        await self._command("HINCRBY", self.meta_key, "entries", by)

    async def scan(self, cursor: int, count: int) -> tuple[int, list[bytes]]:
        """Some entries' keys and the next cursor (0: that was the last)."""
        pattern = f"{self.entry_prefix}*"
        reply = await self._command("SCAN", cursor, "MATCH", pattern, "COUNT", count)
        return int(reply[0]), list(reply[1])

    async def _run(
        self, name: str, keys: list[str], arguments: Sequence[Any], timeout_s: float
    ) -> Any:
        script = self._scripts[name]
        return await self._link.call(lambda client: script(keys, arguments, client), timeout_s)

    async def _command(self, *words: Any) -> Any:
        return await self._link.call(lambda client: client.execute_command(*words))
