"""Memory of keys and values: how much there is, and what each round must do with it.

`KVCacheManager` sizes it at start. `CacheEngine` collects the copies of a round and holds blocks
back until no launched round can still write to them.
"""

from collections import deque
from dataclasses import dataclass

from services.common.config.settings import ConfigError
from services.engine.contract.config import EngineConfig
from services.engine.contract.memory_size import parse_size
from services.engine.contract.runner import RunnerInfo
from services.engine.scheduling.block_manager import BlockManager
from services.engine.scheduling.sequence import Request, Sequence


@dataclass(frozen=True, slots=True)
class KVCacheManager:
    """The decided size of the cache."""

    num_blocks: int
    """Blocks that are handed out; the runner makes one more, block 0, for padding."""
    block_size: int
    max_model_len: int
    bytes_per_block: int

    @property
    def kv_bytes(self) -> int:
        """Bytes of all block tensors."""
        return (self.num_blocks + 1) * self.bytes_per_block

    @property
    def num_positions(self) -> int:
        """Positions of all blocks that are handed out."""
        return self.num_blocks * self.block_size

    @classmethod
    def plan(cls, config: EngineConfig, info: RunnerInfo, free_bytes: int) -> "KVCacheManager":
        """Decide from the configuration and the bytes that the profile left.

        With `num_blocks` fixed by hand a request of full length need not fit: such requests are
        refused one by one. Otherwise that is a mistake of the configuration.

        Raises:
            ConfigError: naming the key and what would work.
        """
        longest = config.max_model_len or info.max_model_len
        if longest > info.max_model_len:
            raise ConfigError(
                f"max_model_len: {longest} is more than the {info.max_model_len} of the model"
            )
        if config.num_blocks:
            return cls(config.num_blocks, config.block_size, longest, info.kv_bytes_per_block)
        budget = kv_budget(config.kv_memory, free_bytes)
        plan = cls(
            max(0, budget // info.kv_bytes_per_block - 1),
            config.block_size,
            longest,
            info.kv_bytes_per_block,
        )
        if plan.num_positions < longest:
            raise ConfigError(plan._too_small(config.kv_memory, budget))
        return plan

    def _too_small(self, given: str, budget: int) -> str:
        least = (-(-self.max_model_len // self.block_size) + 1) * self.bytes_per_block
        kib = -(-least // 2**10)
        if not self.num_blocks:
            return (
                f"kv_memory: {given} is {budget} bytes, too few for one block of "
                f"{self.block_size} tokens; one request of max_model_len {self.max_model_len} "
                f"takes {kib}KiB"
            )
        return (
            f"kv_memory: {given} holds {self.num_positions} tokens, less than one request of "
            f"max_model_len {self.max_model_len}; raise kv_memory (to {kib}KiB) or set "
            f"max_model_len to at most {self.num_positions}"
        )


def kv_budget(text: str, free_bytes: int) -> int:
    """Bytes for blocks: a fraction of what is free (0.9) or a size (2GiB).

    Raises:
        ConfigError: neither of both, or more than there is.
    """
    try:
        wanted = parse_size(text)
    except ValueError as error:
        raise ConfigError(f"kv_memory: {error}, got {text!r}") from error
    if isinstance(wanted, float):
        return int(free_bytes * wanted)
    if wanted > free_bytes:
        raise ConfigError(
            f"kv_memory: {text} is more than the {free_bytes / 2**20:.0f} MiB that are free"
        )
    return wanted


class CacheEngine:
    """Copies and delayed releases, tagged with their rounds; it decides nothing."""

    def __init__(self, block_manager: BlockManager) -> None:
        self._blocks = block_manager
        self._copies: list[tuple[int, int]] = []
        self._pending: deque[tuple[int, tuple[int, ...], Request | None]] = deque()
        self._collected = 0
        self.num_pending = 0
        """Block references that come back with the rounds in flight."""

    def copy(self, source: int, target: int) -> None:
        """Copy a block before the next round; the source's extra reference is given back after."""
        self._copies.append((source, target))

    def take_copies(self, step: int) -> tuple[tuple[int, int], ...]:
        """The copies of this round."""
        copies, self._copies = tuple(self._copies), []
        for source, _ in copies:
            self._hold(step, (source,), None)
        return copies

    def retire(self, seq: Sequence, released: list[Request]) -> None:
        """Take a sequence's blocks: for good if it has ended, else for its recompute.

        Requests that hold nothing any more are appended to `released`.
        """
        request = seq.request if seq.finished else None
        table, seq.block_table, seq.capacity = seq.block_table, (), 0
        self.release(seq.last_step, table, request, released)

    def release(
        self,
        last_step: int,
        blocks: tuple[int, ...],
        request: Request | None,
        released: list[Request],
    ) -> None:
        """Give blocks back, at once or when the last round that may write to them is collected."""
        if last_step > self._collected:
            self._hold(last_step, blocks, request)
        else:
            self._drop(blocks, request, released)

    def collected(self, step: int) -> list[Request]:
        """Round `step` has ended on the device; returns requests that hold nothing any more."""
        self._collected = step
        released: list[Request] = []
        while self._pending and self._pending[0][0] <= step:
            _, blocks, request = self._pending.popleft()
            self.num_pending -= len(blocks)
            self._drop(blocks, request, released)
        return released

    def forget_planned(self) -> list[Request]:
        """Nothing is in flight: drop what waits for a round that was planned and never launched.

        Later rounds are still to be collected, whatever their numbers.
        """
        collected = self._collected
        released = self.collected(max((step for step, _, _ in self._pending), default=collected))
        self._collected = collected
        return released

    def held_tables(self) -> list[tuple[int, ...]]:
        """Tables that wait for their release, for the integrity check."""
        return [blocks for _, blocks, _ in self._pending] + [
            (source,) for source, _ in self._copies
        ]

    def _hold(self, step: int, blocks: tuple[int, ...], request: Request | None) -> None:
        self._pending.append((step, blocks, request))
        self.num_pending += len(blocks)

    def _drop(
        self, blocks: tuple[int, ...], request: Request | None, released: list[Request]
    ) -> None:
        self._blocks.drop(reversed(blocks))
        if request is not None:
            request.unreleased_choices -= 1
            if request.unreleased_choices == 0:
                released.append(request)
