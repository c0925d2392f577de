"""A runner without a model, for load simulation (`--simulate`) and tests.

It stores token ids in paged blocks and computes the next token from a checksum of all ids that the
block table leads to. So a wrong table, a lost write or a block that is used twice changes tokens,
as it would with keys and values.

With `window`, a cell holds a checksum of its token and of the cells in the window before it, as a
key of a sliding layer depends on those that its row attended to. With `state_boundary`, each
sequence also has a slot with a checksum of its tokens, which is mixed into the next token: a wrong
snapshot, a slot that was not cleared or a slot that two sequences use changes tokens. With
`state_replay` too, the checksum comes back from the blocks where a replay begins.
"""

import time
import zlib
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

import numpy as np

from services.common.config.settings import ConfigError
from services.engine.contract.expert_placement import check_placement
from services.engine.contract.runner import (
    ExpertPlacement,
    ExpertShape,
    PendingOutput,
    PlacementRefusedError,
    RunnerInfo,
    SampledToken,
    SamplerOutput,
    SamplingRow,
    SequenceMetadata,
    StateBlock,
    StateReplay,
)

_KV_BYTES_PER_TOKEN = 64
_UNWRITTEN = 2**32 - 1
_STATE_BYTES = 256
_LOOK_BACK = 3
_STATE_SALT = 0x9E3779B9
"""Mixed into a state, so that it differs from the checksum of the same tokens in blocks."""


@dataclass(frozen=True, slots=True)
class SimulatedModel:
    """Properties of the simulated model."""

    vocab_size: int = 512
    max_model_len: int = 2048
    eos: int = 0
    forward_ms: float = 0.0
    """Milliseconds of every forward."""
    token_us: float = 0.0
    """Microseconds of each position in a forward, in addition."""
    experts: int = 0
    """Logical experts of each layer with experts; 0 for a dense model."""
    moe_layers: int = 2
    """Layers with experts. In layer i a token loads the expert (token id + i) mod experts."""
    slots: int = 0
    """Physical slots of each layer; 0 for one per expert."""
    ranks: int = 1
    window: int = 0
    """Positions that a row attends to, its own included; 0 for all."""
    state_boundary: int = 0
    """Positions between two boundaries of the fixed-size state; 0 for a model without state."""
    state_replay: int = 0
    """Positions that rebuild the state (`StateReplay`); 0: a hit needs a snapshot."""

    @property
    def state(self) -> StateBlock | None:
        """The declaration of the state; None without."""
        if not self.state_boundary:
            return None
        replay = StateReplay(self.state_replay, self.state_boundary, _LOOK_BACK)
        return StateBlock(_STATE_BYTES, self.state_boundary, replay if self.state_replay else None)

    def checksum(self, token_ids: Sequence[int]) -> int:
        """What the next token follows from, computed from the whole history without blocks."""
        if self.window:
            cells = array("I")
            for token_id in token_ids:
                cells.append(_window_cell(token_id, cells[-(self.window - 1) or len(cells) :]))
            value = cells[-1]
        else:
            value = checksum_of(token_ids)
        return _with_state(value, _next_state(0, token_ids)) if self.state_boundary else value

    @property
    def expert_shape(self) -> ExpertShape | None:
        """Sizes for a placement; None for a dense model."""
        if not self.experts:
            return None
        return ExpertShape(self.moe_layers, self.experts, self.slots or self.experts, self.ranks)

    @classmethod
    def parse(cls, text: str) -> "SimulatedModel":
        """Parse the option `simulate`: e.g. `vocab_size=512,token_us=10`; `yes` for the defaults.

        Raises:
            ConfigError: a name is unknown, or a value is not a number or below 0.
        """
        known = {f.name: float if f.type in (float, "float") else int for f in fields(cls)}
        values: dict[str, float] = {}
        for part in [] if text == "yes" else text.split(","):
            name, _, value = part.strip().partition("=")
            if name not in known:
                raise ConfigError(f"simulate: unknown name {name!r}; use {', '.join(known)}")
            try:
                values[name] = known[name](value)
            except ValueError as error:
                raise ConfigError(f"simulate: {name}={value!r} is not a number") from error
            if values[name] < 0:
                raise ConfigError(f"simulate: {name}={value} is below 0")
        return cls(**values)  # type: ignore[arg-type]


class SimulatedRunner:
    """A `contract.runner.Runner`; see the module's docstring."""

    def __init__(
        self,
        block_size: int,
        model: SimulatedModel = SimulatedModel(),
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._block_size = block_size
        self._model = model
        self._sleep = sleep
        self._cells = array("I")
        self._states = array("I")
        self._loads = [[0] * model.experts for _ in range(model.moe_layers)]
        self._placement_version = 0
        self._prepared: ExpertPlacement | None = None

    def describe(self) -> RunnerInfo:
        """See Runner."""
        model = self._model
        return RunnerInfo(
            model="fake",
            model_revision=_revision(model),
            numerics_id="fake",
            kv_layout="fake",
            vocab_size=model.vocab_size,
            max_model_len=model.max_model_len,
            eos_token_ids=(model.eos,),
            kv_bytes_per_block=_KV_BYTES_PER_TOKEN * self._block_size,
            weights_bytes=0,
            load_s=0.0,
            experts=model.expert_shape,
            window=model.window,
            state=model.state,
        )

    def profile_kv_bytes(self, max_num_batched_tokens: int, max_num_seqs: int) -> int:
        """See Runner; enough for 64 sequences of full length."""
        return 64 * self._model.max_model_len * _KV_BYTES_PER_TOKEN

    def allocate(self, num_blocks: int, num_states: int = 0) -> None:
        """See Runner."""
        self._cells = array("I", [_UNWRITTEN]) * (num_blocks * self._block_size)
        self._states = array("I", [_UNWRITTEN]) * num_states

    def execute_main_model(
        self,
        step: int,
        batch: Sequence[SequenceMetadata],
        previous: SamplerOutput | PendingOutput | None,
    ) -> object:
        """See Runner; returns a checksum per sampled sequence, and prompt log-probabilities."""
        delay_s = self._model.forward_ms / 1e3
        delay_s += sum(len(m.token_ids) for m in batch) * self._model.token_us / 1e6
        if delay_s:
            self._sleep(delay_s)
        for meta in batch:
            self._write(meta, previous)
        sums = tuple(self._checksum(meta) for meta in batch if meta.sample)
        prompt = tuple(
            (meta.seq_id, _prompt_entries(meta))
            for meta in batch
            if meta.prompt_logprobs_from is not None
        )
        return sums, prompt

    def execute_sample(
        self, step: int, hidden: object, rows: Sequence[SamplingRow]
    ) -> SamplerOutput:
        """See Runner."""
        assert isinstance(hidden, tuple), "hidden must be what execute_main_model returned"
        sums, prompt = hidden
        ids = [
            next_token(value, row, self._model.vocab_size)
            if row.token_mask is None
            else masked_token(value, row)
            for value, row in zip(sums, rows, strict=True)
        ]
        return SamplerOutput(
            step=step,
            tokens=tuple(SampledToken(token_id or 0, -0.5) for token_id in ids),
            prompt_logprobs=prompt,
            empty_rows=tuple(row for row, token_id in enumerate(ids) if token_id is None),
        )

    def scrub(self) -> tuple[int, ...]:
        """See Runner; there are no values."""
        return ()

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """See Runner."""
        size = self._block_size
        for source, target in pairs:
            cells = self._cells[source * size : (source + 1) * size]
            self._cells[target * size : (target + 1) * size] = cells

    def clear_states(self, slots: Sequence[int]) -> None:
        """See Runner."""
        for slot in slots:
            self._states[slot] = 0

    def copy_states(self, pairs: Sequence[tuple[int, int]]) -> None:
        """See Runner."""
        for source, target in pairs:
            self._states[target] = self._states[source]

    @property
    def placement_version(self) -> int:
        """See Runner."""
        return self._placement_version

    def prepare_placement(self, placement: ExpertPlacement) -> bool:
        """See Runner; needs two calls, as a real runner needs several."""
        info = self.describe()
        check_placement(placement, info.experts, info.model_revision)
        ready = self._prepared == placement
        self._prepared = placement
        return ready

    def apply_placement(self, version: int) -> None:
        """See Runner."""
        if self._prepared is None or self._prepared.version != version:
            raise PlacementRefusedError(f"version {version} is not prepared")
        self._prepared = None
        self._placement_version = version

    def expert_loads(self) -> tuple[tuple[int, ...], ...] | None:
        """See Runner; counts since the start, not over a window."""
        return tuple(map(tuple, self._loads)) if self._model.experts else None

    def check(self) -> None:
        """See Runner; no part of it can fail."""

    def close(self) -> None:
        """See Runner."""

    def _write(
        self, meta: SequenceMetadata, previous: SamplerOutput | PendingOutput | None
    ) -> None:
        ids = list(meta.token_ids)
        if meta.prev_row is not None:
            assert isinstance(previous, SamplerOutput), "prev_row without a previous round"
            ids[-1] = previous.tokens[meta.prev_row].token_id
        self._count(ids)
        for position, token_id in enumerate(ids, meta.start):
            cell = token_id
            if self._model.window:
                first = max(0, position - self._model.window + 1)
                cell = _window_cell(token_id, self._read(meta, first, position))
            if position < meta.history_from:
                found = self._cells[self._cell_of(meta, position)]
                assert found == cell, f"position {position} of the cached history is another one"
            else:
                self._cells[self._cell_of(meta, position)] = cell
        if self._model.state_boundary:
            assert meta.state_slot != 0, "slot 0 is reserved for padding"
            if meta.state_from and meta.start == meta.state_from:
                self._rebuild_state(meta)
            self._states[meta.state_slot] = _next_state(self._states[meta.state_slot], ids)

    def _rebuild_state(self, meta: SequenceMetadata) -> None:
        """Bring the state back from the history, exactly, which a real model cannot."""
        assert self._states[meta.state_slot] == 0, "a replay begins with a slot of zeros"
        before = self._read(meta, 0, meta.start)
        assert meta.earlier_tokens == tuple(before[-_LOOK_BACK:]), "wrong tokens before a replay"
        self._states[meta.state_slot] = _next_state(0, before)

    def _count(self, token_ids: Sequence[int]) -> None:
        if self._model.experts:
            for layer, loads in enumerate(self._loads):
                for token_id in token_ids:
                    loads[(token_id + layer) % self._model.experts] += 1

    def _cell_of(self, meta: SequenceMetadata, position: int) -> int:
        block = meta.block_table[position // self._block_size]
        assert block != 0, "block 0 is reserved for padding"
        return block * self._block_size + position % self._block_size

    def _read(self, meta: SequenceMetadata, first: int, end: int) -> "array[int]":
        return array("I", (self._cells[self._cell_of(meta, p)] for p in range(first, end)))

    def _checksum(self, meta: SequenceMetadata) -> int:
        if self._model.window:
            value = self._cells[self._cell_of(meta, meta.seqlen_k - 1)]
        else:
            value = self._checksum_of_all(meta)
        if self._model.state_boundary:
            value = _with_state(value, self._states[meta.state_slot])
        return value

    def _checksum_of_all(self, meta: SequenceMetadata) -> int:
        size, left, value = self._block_size, meta.seqlen_k, 0
        cells = memoryview(self._cells)
        for block in meta.block_table:
            count = min(size, left)
            value = zlib.crc32(cells[block * size : block * size + count], value)
            left -= count
            if not left:
                break
        return value


def next_token(checksum: int, row: SamplingRow, vocab_size: int) -> int:
    """The token after a history with this checksum, with the row's sampling parameters."""
    params = row.params
    checksum = _with_noise(checksum, row)
    allowed = params.allowed_token_ids
    if allowed:
        return allowed[checksum % len(allowed)]
    forbidden = {*row.forbid_token_ids, *params.bad_token_ids}
    token_id = checksum % vocab_size
    while token_id in forbidden:
        token_id = (token_id + 1) % vocab_size
    return token_id


def masked_token(checksum: int, row: SamplingRow) -> int | None:
    """As `next_token`, among the ids that the row's mask allows; None if it allows none."""
    words = np.asarray(row.token_mask, dtype=np.int32)
    ids = set(np.unpackbits(words.view(np.uint8), bitorder="little").nonzero()[0].tolist())
    ids &= {*row.params.allowed_token_ids} or ids
    ids -= {*row.forbid_token_ids, *row.params.bad_token_ids}
    return sorted(ids)[_with_noise(checksum, row) % len(ids)] if ids else None


def _with_noise(checksum: int, row: SamplingRow) -> int:
    if row.params.temperature <= 0:
        return checksum
    return zlib.crc32(f"{row.seed}/{row.choice}/{row.position}".encode(), checksum)


def checksum_of(token_ids: Sequence[int]) -> int:
    """Checksum of a whole history, as the blocks of its sequence must give."""
    return zlib.crc32(array("I", token_ids).tobytes())


def _window_cell(token_id: int, before: "array[int]") -> int:
    """The cell of a token after the cells in its window."""
    return zlib.crc32(before.tobytes(), token_id + 1)


def _next_state(state: int, token_ids: Sequence[int]) -> int:
    """The state after further tokens; 0 is the state before any, as a cleared slot holds it."""
    return zlib.crc32(array("I", token_ids).tobytes(), state)


def _with_state(checksum: int, state: int) -> int:
    return zlib.crc32((state ^ _STATE_SALT).to_bytes(4), checksum)


def _revision(model: SimulatedModel) -> str:
    """A name of everything that tokens depend on."""
    kinds = "".join(
        f"-{kind}{size}"
        for kind, size in (("w", model.window), ("s", int(model.state_boundary > 0)))
        if size
    )
    return f"fake-{model.vocab_size}-{model.eos}{kinds}"


def _prompt_entries(meta: SequenceMetadata) -> tuple[SampledToken, ...]:
    """One entry per reported position; the log-probability encodes the position, for tests."""
    assert meta.prompt_logprobs_from is not None
    following = [*meta.token_ids[1:]]
    if meta.next_prompt_token is not None:
        following.append(meta.next_prompt_token)
    skip = meta.prompt_logprobs_from - meta.start
    return tuple(
        SampledToken(token_id, -float(meta.start + index + 1))
        for index, token_id in enumerate(following)
        if index >= skip
    )
