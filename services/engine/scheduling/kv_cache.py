"""Memory of the KV cache: `KVCacheManager` decides its size at start; `CacheEngine` collects the
copies and snapshots of a round and delays the release of blocks and slots of state until no
launched round can write to them."""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from services.common.config.settings import ConfigError
from services.engine.contract.config import EngineConfig
from services.engine.contract.memory_size import parse_size
from services.engine.contract.runner import RunnerInfo, StateBlock
from services.engine.scheduling.block_manager import BlockManager
from services.engine.scheduling.scheduler_outputs import NO_STATE_WORK, StateWork
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
    num_states: int = 0
    """Slots of state for sequences and snapshots; the runner allocates one more, slot 0."""
    bytes_per_state: int = 0

    @property
    def kv_bytes(self) -> int:
        """Bytes of all blocks and slots, padding included."""
        return (self.num_blocks + 1) * self.bytes_per_block + self.state_bytes

    @property
    def state_bytes(self) -> int:
        """Bytes of all slots of state, slot 0 included; 0 for a model without state."""
        return (self.num_states + 1) * self.bytes_per_state if self.num_states else 0

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
        nbytes = info.state.nbytes if info.state else 0
        states = _states_wanted(config, info.state) if info.state else 0
        if config.num_blocks:
            return cls(
                config.num_blocks,
                config.block_size,
                longest,
                info.kv_bytes_per_block,
                states,
                nbytes,
            )
        budget = kv_budget(config.kv_memory, free_bytes)
        if nbytes and not config.state_slots:
            # At least one; else as many as are wanted, in at most half of the memory and with room
            # for the history of one request.
            history = (-(-longest // config.block_size) + 1) * info.kv_bytes_per_block
            room = min(budget // 2, budget - history)
            states = max(1, min(states, room // nbytes - 1))
        left = budget - (states + 1) * nbytes if nbytes else budget
        plan = cls(
            max(0, left // info.kv_bytes_per_block - 1),
            config.block_size,
            longest,
            info.kv_bytes_per_block,
            states,
            nbytes,
        )
        if plan.num_positions < longest:
            raise ConfigError(plan._too_small(config.kv_memory, budget))
        return plan

    def make_blocks(self, info: RunnerInfo, *, prefix_cache: bool) -> BlockManager:
        """A manager of these blocks and slots, for a model with the window and state of `info`."""
        return BlockManager(
            self.num_blocks,
            self.block_size,
            prefix_cache=prefix_cache,
            window=info.window,
            state=info.state,
            num_states=self.num_states,
        )

    def _too_small(self, given: str, budget: int) -> str:
        least = (-(-self.max_model_len // self.block_size) + 1) * self.bytes_per_block
        kib = -(-(least + self.state_bytes) // 2**10)
        if self.num_states:
            return self._too_small_with_state(given, budget, kib)
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

    def _too_small_with_state(self, given: str, budget: int, kib: int) -> str:
        message = (
            f"kv_memory: {given} is {budget} bytes; {self.num_states} slots of state, each of "
            f"{self.bytes_per_state} bytes, and slot 0 take {self.state_bytes}, and what is left "
            f"holds {self.num_positions} tokens, less than one request of max_model_len "
            f"{self.max_model_len}; raise kv_memory (to {kib}KiB)"
        )
        if self.num_states > 1:
            message += " or set state_slots lower"
        if self.num_positions:
            message += f" or set max_model_len to at most {self.num_positions}"
        return message


def check_kinds(info: RunnerInfo) -> None:
    """Check that the memory that a model declares can be served.

    Raises:
        ConfigError: it declares a window of all layers and a state.
    """
    if info.window and info.state is not None:
        raise ConfigError(
            f"model: {info.model} declares a window of {info.window} positions and a state of "
            f"{info.state.nbytes} bytes; declare one of them: a model with state keeps its "
            "window in it"
        )


def _states_wanted(config: EngineConfig, state: StateBlock) -> int:
    """Slots of state: one per running sequence and as many for snapshots, if not configured."""
    if config.state_slots:
        return config.state_slots
    running = min(config.max_num_seqs, config.max_num_batched_tokens)
    return 2 * running if config.prefix_cache and not state.replay else running


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
    states: tuple[int, ...] = ()


class _Save(NamedTuple):
    """A snapshot that round `step` makes."""

    step: int
    seq: Sequence
    end: int
    """Positions before it."""
    slot: int


class CacheEngine:
    """Copies, snapshots and delayed releases, each tagged with its round.

    It decides nothing about blocks; a snapshot is made if there is a slot for it.
    """

    def __init__(self, block_manager: BlockManager) -> None:
        self._blocks = block_manager
        self._copies: list[tuple[int, int]] = []
        self._pending: deque[_Held] = deque()
        self._collected = 0
        self._num_pending = 0
        self._saves: deque[_Save] = deque()

    @property
    def num_pending(self) -> int:
        """Block references that come back when the rounds in flight are collected."""
        return self._num_pending

    @property
    def num_pending_states(self) -> int:
        """Slots of state that come back when the rounds in flight are collected: those of
        sequences that left, snapshots held for a copy, and snapshots that are being made."""
        return sum(len(held.states) for held in self._pending) + len(self._saves)

    def copy(self, source: int, target: int) -> None:
        """Copy a block before the next round; the source's extra reference is dropped after it."""
        self._copies.append((source, target))

    def take_copies(self, step: int) -> tuple[tuple[int, int], ...]:
        """The copies to make before round `step`, (source, target)."""
        copies, self._copies = tuple(self._copies), []
        for source, _ in copies:
            self._hold(step, (source,), None)
        return copies

    def take_state_work(self, step: int, seqs: Iterable[Sequence]) -> StateWork:
        """What round `step`, which computes these sequences, does with slots of state.

        Snapshots that sequences restart from keep an extra reference until it is collected. A
        sequence at a boundary is saved if there is a slot for it, with the eviction of the oldest
        snapshot if need be.
        """
        states = self._blocks.states
        if states is None:
            return NO_STATE_WORK
        clears, restores = states.take_starts()
        if restores:
            self._hold(step, (), None, tuple(source for source, _ in restores))
        saves = []
        for seq in seqs:
            if self._blocks.wants_snapshot(seq, seq.num_computed):
                slot = states.take_for_snapshot(seq, seq.num_computed)
                if slot is not None:
                    saves.append((seq.state_slot, slot))
                    self._saves.append(_Save(step, seq, seq.num_computed, slot))
        return StateWork(clears, restores, tuple(saves))

    def register_snapshots(self, step: int) -> None:
        """Make the snapshots of round `step` usable; its blocks must be registered.

        `collected` frees those of a round for which this was not called.
        """
        while self._saves and self._saves[0].step <= step:
            _, seq, end, slot = self._saves.popleft()
            self._blocks.register_snapshot(seq, end, slot)

    def retire(self, seq: Sequence) -> bool:
        """Take the blocks and the slot of a sequence that has ended or is being preempted.

        Returns whether its request has ended and holds no block any more.
        """
        request = seq.request if seq.finished else None
        slot = seq.remove_state()
        if slot and self._blocks.states is not None:
            self._blocks.states.cancel_start(slot)
        slots = (slot,) if slot else ()
        return self.release(seq.last_step, seq.remove_blocks(), request, slots)

    def release(
        self,
        last_step: int,
        blocks: tuple[int, ...],
        request: Request | None = None,
        states: tuple[int, ...] = (),
    ) -> bool:
        """Free blocks now, or when round `last_step`, which may write to them, is collected.

        Args:
            request: the request of the ended choice that held them, if any.

        Returns whether that request holds no block any more.
        """
        if last_step > self._collected:
            self._hold(last_step, blocks, request, states)
            return False
        return self._drop(blocks, request, states)

    def collected(self, step: int) -> list[Request]:
        """Free what waited for round `step`; returns requests that hold no block any more."""
        self._collected = step
        released: list[Request] = []
        while self._pending and self._pending[0].step <= step:
            _, blocks, request, states = self._pending.popleft()
            self._num_pending -= len(blocks)
            if self._drop(blocks, request, states) and request is not None:
                released.append(request)
        while self._saves and self._saves[0].step <= step:
            self._blocks.drop_states((self._saves.popleft().slot,))
        return released

    def drop_planned(self) -> list[Request]:
        """With no round in flight: free what waits for a round that was planned, never launched.

        Later rounds are still to be collected, so the number of the last collected one stays.
        Returns requests that hold no block any more.
        """
        collected = self._collected
        steps = [held.step for held in self._pending]
        steps += [save.step for save in self._saves]
        released = self.collected(max(steps, default=collected))
        self._collected = collected
        return released

    def held_tables(self) -> list[tuple[int, ...]]:
        """Blocks that wait for their release, for the integrity check."""
        copied = [(source,) for source, _ in self._copies]
        return [held.blocks for held in self._pending] + copied

    def held_states(self) -> list[int]:
        """Slots that wait for their release or to become snapshots, for the integrity check."""
        return [slot for held in self._pending for slot in held.states] + [
            save.slot for save in self._saves
        ]

    def _hold(
        self,
        step: int,
        blocks: tuple[int, ...],
        request: Request | None,
        states: tuple[int, ...] = (),
    ) -> None:
        self._pending.append(_Held(step, blocks, request, states))
        self._num_pending += len(blocks)

    def _drop(
        self, blocks: tuple[int, ...], request: Request | None, states: tuple[int, ...]
    ) -> bool:
        self._blocks.drop(reversed(blocks))
        self._blocks.drop_states(states)
        return request is not None and request.release_choice()
