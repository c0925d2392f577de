"""The prefix index in Redis: which engine holds which blocks, by life (epoch) of each engine.

All state is in Redis, so that any number of these services can serve the same index. The scripts in
lua/ check the fence of a batch and apply it in one step; owners.lua describes the keys.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import redis.asyncio as aioredis

from services.kvcache.entry_reads import encode_reads
from services.kvcache.events import Batch, Operation, split_operations
from services.kvcache.prefix_match import PrefixMatch
from services.kvcache.redis_client import encode
from services.kvcache.redis_connection import RedisConnection, RedisUnavailableError
from services.kvcache.redis_settings import RedisSettings

_LUA = Path(__file__).parent / "lua"
_NO_PART = -1
"""How apply.lua writes a batch outside a snapshot."""


class Status(StrEnum):
    """The outcome of a batch."""

    APPLIED = "applied"
    DUPLICATE = "duplicate"
    GAP = "gap"
    STALE = "stale"


@dataclass(frozen=True)
class Applied:
    """The outcome of a batch, and the state of its engine's epoch in the index."""

    status: Status
    acked: int
    """Every batch of this epoch up to this sequence number is in the index."""
    refused_entries: int = 0
    """Blocks that were not stored because of `max_entries`."""


@dataclass(frozen=True)
class Match:
    """This life of the engine holds the first `blocks` blocks of the prompt."""

    engine_id: str
    epoch_ms: int
    blocks: int


@dataclass(frozen=True)
class Owner:
    """An engine's record in the index."""

    engine_id: str
    epoch_ms: int
    sequence: int
    """The last applied batch of this epoch."""
    live: bool
    """Whether the index holds blocks of it, or a snapshot is under way."""


class PrefixIndex:
    """Reads and writes the index. Because of Redis, calls raise RedisUnavailableError only.

    Args:
        entry_ttl_s: seconds after which Redis drops an entry that no sweep has renewed.
        max_entries: blocks to keep; further ones are refused.
    """

    def __init__(self, settings: RedisSettings, *, entry_ttl_s: int, max_entries: int) -> None:
        self.entry_prefix = f"{settings.prefix}:b:"
        self.owners_key, self.live_key, self.meta_key = (
            f"{settings.prefix}:{name}" for name in ("owners", "live", "meta")
        )
        self.max_entries = max_entries
        self._entry_ttl_s = entry_ttl_s
        self._connection = RedisConnection(settings)
        # Never connected: redis-py registers scripts with a client, and can run them on others.
        registry: Any = aioredis.Redis()
        owners = (_LUA / "owners.lua").read_text()
        self._scripts = {
            name: registry.register_script(owners + (_LUA / f"{name}.lua").read_text())
            for name in ("apply", "forget", "touch", "sweep")
        }
        self._read_live = encode(b"HGETALL", self.live_key.encode())

    @property
    def available(self) -> bool:
        """Whether Redis answered the last call or probe."""
        return self._connection.available

    async def start(self) -> None:
        """Connect to Redis, and keep checking it in the background.

        Raises:
            UnsuitableRedisError: Redis answered and cannot be used. No error if it is unavailable.
        """
        await self._connection.start()

    async def close(self) -> None:
        """Close all connections; idempotent."""
        await self._connection.close()

    async def apply(self, batch: Batch) -> Applied:
        """Apply a batch if it follows the last one of its engine's newest epoch.

        A batch that is too large for one script is applied in pieces; the last one completes it.
        """
        pieces = list(split_operations(batch.operations))
        refused = 0
        applied = Applied(Status.GAP, 0)
        for i, piece in enumerate(pieces):
            arguments = self._apply_arguments(batch, piece, i == 0, i == len(pieces) - 1)
            status, acked, not_stored, _ = await self._run_script("apply", arguments)
            refused += int(not_stored)
            applied = Applied(Status(status.decode()), int(acked), refused)
            if applied.status is not Status.APPLIED:
                break
        return applied

    async def match(self, hashes: bytes, needs_state: bool, timeout_s: float) -> list[Match]:
        """The longest contiguous prefix of the prompt per engine that holds at least one block.

        The live owners are read before the blocks. So the answer may count an owner whose life
        ends meanwhile, as a Match a moment earlier would have, and never counts a later life.

        Args:
            hashes: the prompt's block hashes, joined.
            needs_state: count a prefix only up to a block whose state the engine holds too.
        """
        if self._connection.slow:
            raise RedisUnavailableError("Redis was too slow for a match and has not answered since")
        found: list[tuple[bytes, int]] = await self._connection.call(
            lambda client: self._read_matches(client, hashes, needs_state), timeout_s
        )
        matches = []
        for name, blocks in found:
            epoch, _, engine_id = name.decode().partition(" ")
            matches.append(Match(engine_id, int(epoch), blocks))
        return matches

    async def forget(self, engine_id: str, epoch_ms: int) -> bool:
        """Drop the blocks of the engine's epochs up to this one; returns whether it had any."""
        return bool(await self._run_script("forget", (engine_id, epoch_ms)))

    async def touch(self, alive: list[str], silence_s: int) -> int:
        """Mark engines as alive and remove the records of others that are silent for long.

        Returns:
            The number of records removed.
        """
        return int(await self._run_script("touch", (silence_s * 1000, *alive)))

    async def owners(self) -> dict[str, Owner]:
        """The records of all engines, by engine id."""
        reply: dict[bytes, bytes] = await self._run_command("HGETALL", self.owners_key)
        found = {}
        for name, raw in reply.items():
            engine_id = name.decode()
            epoch, sequence, *_ = raw[12:].split()
            found[engine_id] = Owner(engine_id, int(epoch), int(sequence), any(raw[:6]))
        return found

    async def num_entries(self) -> int:
        """Blocks in the index, as counted by the scripts and corrected by each sweep."""
        return int(await self._run_command("HGET", self.meta_key, "entries") or 0)

    async def adjust_entries(self, by: int) -> None:
        """Correct the count of blocks for those that Redis evicted or expired."""
        await self._run_command("HINCRBY", self.meta_key, "entries", by)

    async def scan(self, cursor: int, count: int) -> tuple[int, list[bytes]]:
        """About `count` keys of entries, and the next cursor; 0 begins and ends a scan."""
        pattern = f"{self.entry_prefix}*"
        reply = await self._run_command("SCAN", cursor, "MATCH", pattern, "COUNT", count)
        return int(reply[0]), list(reply[1])

    async def sweep_entries(self, keys: Sequence[bytes], surplus: int) -> tuple[int, int]:
        """Remove dead owners from entries, delete those without an owner, renew the others.

        Args:
            surplus: entries to delete although they have owners.

        Returns:
            The number of entries deleted, and how many of them had owners.
        """
        deleted, given_up = await self._run_script("sweep", (self._entry_ttl_s, surplus, *keys))
        return int(deleted), int(given_up)

    def _apply_arguments(
        self, batch: Batch, piece: Sequence[Operation], first: bool, last: bool
    ) -> list[str | int | bytes]:
        """The arguments of apply.lua, which lists them."""
        arguments: list[str | int | bytes] = [
            batch.engine_id,
            batch.epoch_ms,
            batch.sequence,
            _NO_PART if batch.part is None else batch.part,
            int(batch.last_part),
            int(first),
            int(last),
            self.entry_prefix,
            self._entry_ttl_s,
            self.max_entries,
        ]
        for code, bits, hashes in piece:
            arguments += (f"{code}{bits or ''}", hashes)
        return arguments

    async def _read_matches(
        self, client: Any, hashes: bytes, needs_state: bool
    ) -> list[tuple[bytes, int]]:
        reads = encode_reads(self.entry_prefix.encode(), hashes)
        live, entries = await client.send(self._read_live + next(reads), 2)
        names = dict(zip(live[::2], live[1::2], strict=True))
        match = PrefixMatch(names, needs_state)
        match.add_entries(entries)
        for read in reads:
            if not match.open:
                break
            (entries,) = await client.send(read, 1)
            match.add_entries(entries)
        return match.result()

    async def _run_script(self, name: str, arguments: Sequence[Any]) -> Any:
        script, keys = self._scripts[name], [self.owners_key, self.live_key, self.meta_key]
        return await self._connection.call(lambda client: script(keys, arguments, client))

    async def _run_command(self, *words: Any) -> Any:
        return await self._connection.call(lambda client: client.execute_command(*words))
