"""The prefix index: which engine holds which blocks, as one life (epoch) of each engine says.

All state is in Redis, so that any number of these services can serve the same index; the scripts
under lua/ apply a batch and check its fence in one step. owners.lua draws the layout.
"""

from dataclasses import dataclass
from enum import StrEnum

from services.kvcache.events import Batch, pieces
from services.kvcache.store import Store


class Status(StrEnum):
    """What became of a batch."""

    APPLIED = "applied"
    DUPLICATE = "duplicate"
    GAP = "gap"
    STALE = "stale"


@dataclass(frozen=True)
class Applied:
    """`acked`: every batch of this epoch up to it is in the store."""

    status: Status
    acked: int
    refused_entries: int = 0


@dataclass(frozen=True)
class Match:
    """The first `blocks` blocks of the prompt are held by this life of the engine."""

    engine_id: str
    epoch_ms: int
    blocks: int


@dataclass(frozen=True)
class Owner:
    """An engine as the index knows it; not `live`: forgotten, or never announced what it holds."""

    engine_id: str
    epoch_ms: int
    sequence: int
    live: bool


class PrefixIndex:
    """Reads and writes the index; every method raises StoreAwayError when Redis is away."""

    def __init__(self, store: Store, *, entry_ttl_s: int, max_entries: int) -> None:
        self._store = store
        self._entry_ttl_s = entry_ttl_s
        self._max_entries = max_entries

    async def apply(self, batch: Batch) -> Applied:
        """Write a batch if it follows the last one of its engine's newest epoch.

        A batch too big for one script is written in pieces, and counts with the last of them.
        """
        cut = list(pieces(batch.operations))
        refused = 0
        applied = Applied(Status.GAP, 0)
        for i, piece in enumerate(cut):
            arguments: list[str | int | bytes] = [
                batch.engine_id,
                batch.epoch_ms,
                batch.sequence,
                -1 if batch.part is None else batch.part,
                int(batch.last_part),
                int(i == 0),
                int(i == len(cut) - 1),
                self._store.entry_prefix,
                self._entry_ttl_s,
                self._max_entries,
            ]
            for code, bits, hashes in piece:
                arguments += (f"{code}{bits or ''}", hashes)
            status, acked, not_kept, _ = await self._store.script("apply", arguments)
            refused += int(not_kept)
            applied = Applied(Status(status.decode()), int(acked), refused)
            if applied.status is not Status.APPLIED:
                break
        return applied

    async def match(self, hashes: bytes, needs_state: bool, timeout_s: float) -> list[Match]:
        """Longest contiguous prefix of the prompt per engine, of those that hold any of it."""
        found = []
        for name, blocks in await self._store.match(hashes, needs_state, timeout_s):
            epoch, _, engine_id = name.decode().partition(" ")
            found.append(Match(engine_id, int(epoch), blocks))
        return found

    async def forget(self, engine_id: str, epoch_ms: int) -> bool:
        """Drop what the engine's epochs up to this one hold; whether there was anything."""
        return bool(await self._store.script("forget", (engine_id, epoch_ms)))

    async def touch(self, alive: list[str], silence_s: int) -> int:
        """Remove records of engines not heard of for `silence_s`; how many."""
        return int(await self._store.script("touch", (silence_s * 1000, *alive)))

    async def owners(self) -> dict[str, Owner]:
        """All engines that the index knows."""
        found = {}
        for name, raw in (await self._store.owners()).items():
            engine_id = name.decode()
            epoch, sequence, *_ = raw[12:].split()
            found[engine_id] = Owner(engine_id, int(epoch), int(sequence), any(raw[:6]))
        return found

    async def num_entries(self) -> int:
        """Blocks in the index, whoever owns them."""
        return await self._store.num_entries()
