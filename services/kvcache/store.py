"""The index's commands and scripts on Redis; `link` says which Redis and bounds each call."""

import struct
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import redis.asyncio as aioredis

from services.common.block_hash import INDEX_HASH_BYTES
from services.kvcache.client import pack
from services.kvcache.link import CALL_TIMEOUT_S, Link, StoreAwayError, StoreSettings
from services.kvcache.prefixes import Prefixes

_LUA = Path(__file__).parent / "lua"
_KEYS_AT_ONCE = 1_024
"""Redis serves nobody else meanwhile: about 0.2 ms."""
_FEW = struct.Struct("16s" * 64)


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
        self._read_live = pack(b"HGETALL", self.live_key.encode())

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

    async def match(
        self, hashes: bytes, needs_state: bool, timeout_s: float
    ) -> list[tuple[bytes, int]]:
        """b"<epoch> <engine id>" and matched blocks of those that hold any of the prompt.

        Who is live is read before the blocks: what a life that ends meanwhile has held may be
        counted, as if it had been asked for a moment earlier, and nothing of a later one.
        """
        if self._link.slow:
            raise StoreAwayError("Redis was too slow for a match and has not answered since")
        found: list[tuple[bytes, int]] = await self._link.call(
            lambda client: self._match(client, hashes, needs_state), timeout_s
        )
        return found

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

    async def _match(
        self, client: Any, hashes: bytes, needs_state: bool
    ) -> list[tuple[bytes, int]]:
        steps = self._reads(hashes)
        live, entries = await client.ask(self._read_live + next(steps), 2)
        names = dict(zip(live[::2], live[1::2], strict=True))
        prefixes = Prefixes(names, needs_state)
        prefixes.take(entries)
        for step in steps:
            if not prefixes.open:
                break
            (entries,) = await client.ask(step, 1)
            prefixes.take(entries)
        return prefixes.found()

    def _reads(self, hashes: bytes) -> Iterator[bytes]:
        """MGETs of the blocks' entries, ready to send: all keys are of one length."""
        prefix = self.entry_prefix.encode()
        before = b"\r\n$%d\r\n%s" % (len(prefix) + INDEX_HASH_BYTES, prefix)
        step = _KEYS_AT_ONCE * INDEX_HASH_BYTES
        for start in range(0, len(hashes), step):
            part = hashes[start : start + step]
            digests = _split(part)
            head = b"*%d\r\n$4\r\nMGET" % (len(digests) + 1)
            yield b"".join((head, before, before.join(digests), b"\r\n"))

    async def _run(
        self, name: str, keys: list[str], arguments: Sequence[Any], timeout_s: float
    ) -> Any:
        script = self._scripts[name]
        return await self._link.call(lambda client: script(keys, arguments, client), timeout_s)

    async def _command(self, *words: Any) -> Any:
        return await self._link.call(lambda client: client.execute_command(*words))


def _split(joined: bytes) -> list[bytes]:
    """The digests one by one; many at a time, which takes a third of slicing each."""
    whole = len(joined) // _FEW.size * _FEW.size
    rest = range(whole, len(joined), INDEX_HASH_BYTES)
    return [
        *chain.from_iterable(_FEW.iter_unpack(joined[:whole])),
        *(joined[start : start + INDEX_HASH_BYTES] for start in rest),
    ]
