"""Memory of the KV cache: `KVCacheManager` decides its size at start; `CacheEngine` collects the
copies of a round and delays the release of blocks until no launched round can write to them."""

from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

from services.common.config.settings import ConfigError
from services.engine.contract.config import EngineConfig
from services.engine.contract.memory_size import parse_size
from services.engine.contract.runner import RunnerInfo
from services.engine.scheduling.block_manager import BlockManager
from services.engine.scheduling.sequence import Request, Sequence


@dataclass(frozen=True, slots=True)
class KVCacheManager:
    """The size of the cache, fixed at start."""

    num_blocks: int
    """Blocks for sequences; the runner allocates one more, block 0, for padding."""
    block_size: int
    """Positions per block."""
    max_model_len: int
    """Longest prompt plus output."""
    bytes_per_block: int

    @property
    def kv_bytes(self) -> int:
        """Bytes of all blocks, padding included."""
        return (self.num_blocks + 1) * self.bytes_per_block

    @property
    def num_positions(self) -> int:
        """Positions of all blocks for sequences."""
        return self.num_blocks * self.block_size

    @classmethod
    def plan(cls, config: EngineConfig, info: RunnerInfo, free_bytes: int) -> "KVCacheManager":
        """Compute the size.

        If `num_blocks` is configured, a request of `max_model_len` may not fit; such requests are
        refused one by one. Otherwise a cache that is too small for it is a configuration error.

        Args:
            free_bytes: memory left after the largest round's own needs.

        Raises:
            ConfigError: naming the key and a value that works.
        """
        longest = config.max_model_len or info.max_model_len
        if longest > info.max_model_len:
            raise ConfigError(
                f"max_model_len: {longest} is more than the model's {info.max_model_len}"
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
    """Bytes for blocks, from a fraction of the free memory (0.9) or a size (2GiB).

    Raises:
        ConfigError: the text is neither, or the size is more than the free memory.
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


class _Held(NamedTuple):
    """Blocks that a launched round may still read or write."""

    step: int
    """The last such round."""
    blocks: tuple[int, ...]
    request: Request | None
    """The request of an ended choice; None for a preemption, a copy or a replaced block."""


class CacheEngine:
    """Copies and delayed releases, each tagged with its round. It decides nothing."""

    def __init__(self, block_manager: BlockManager) -> None:
        self._blocks = block_manager
        self._copies: list[tuple[int, int]] = []
        self._pending: deque[_Held] = deque()
        self._collected = 0
        self._num_pending = 0

    @property
    def num_pending(self) -> int:
        """Block references that come back when the rounds in flight are collected."""
        return self._num_pending

    def copy(self, source: int, target: int) -> None:
        """Copy a block before the next round; the source's extra reference is dropped after it."""
        self._copies.append((source, target))

    def take_copies(self, step: int) -> tuple[tuple[int, int], ...]:
        """The copies to make before round `step`, (source, target)."""
        copies, self._copies = tuple(self._copies), []
        for source, _ in copies:
            self._hold(step, (source,), None)
        return copies

    def retire(self, seq: Sequence) -> bool:
        """Take the blocks of a sequence that has ended or is being preempted.

        Returns whether its request has ended and holds no block any more.
        """
        request = seq.request if seq.finished else None
        return self.release(seq.last_step, seq.remove_blocks(), request)

    def release(
        self, last_step: int, blocks: tuple[int, ...], request: Request | None = None
    ) -> bool:
        """Free blocks now, or when round `last_step`, which may write to them, is collected.

        Args:
            request: the request of the ended choice that held them, if any.

        Returns whether that request holds no block any more.
        """
        if last_step > self._collected:
            self._hold(last_step, blocks, request)
            return False
        return self._drop(blocks, request)

    def collected(self, step: int) -> list[Request]:
        """Free what waited for round `step`; returns requests that hold no block any more."""
        self._collected = step
        released: list[Request] = []
        while self._pending and self._pending[0].step <= step:
            _, blocks, request = self._pending.popleft()
            self._num_pending -= len(blocks)
            if self._drop(blocks, request) and request is not None:
                released.append(request)
        return released

    def drop_planned(self) -> list[Request]:
        """With no round in flight: free what waits for a round that was planned, never launched.

        Later rounds are still to be collected, so the number of the last collected one stays.
        Returns requests that hold no block any more.
        """
        collected = self._collected
        released = self.collected(max((held.step for held in self._pending), default=collected))
        self._collected = collected
        return released

    def held_tables(self) -> list[tuple[int, ...]]:
        """Blocks that wait for their release, for the integrity check."""
        copied = [(source,) for source, _ in self._copies]
        return [held.blocks for held in self._pending] + copied

    def _hold(self, step: int, blocks: tuple[int, ...], request: Request | None) -> None:
        self._pending.append(_Held(step, blocks, request))
        self._num_pending += len(blocks)

    def _drop(self, blocks: tuple[int, ...], request: Request | None) -> bool:
        self._blocks.drop(reversed(blocks))
        return request is not None and request.release_choice()
