"""The plan of one round: `SchedulerOutputs`, frozen, and the builder that the scheduler fills."""

from dataclasses import dataclass
from typing import NewType

from services.engine.scheduling.sequence import Sequence, SequenceMetadata

Step = NewType("Step", int)
"""Number of a launched round; the first is 1."""

_UNKNOWN = (0,)
"""Input of a position whose token is still in flight."""


@dataclass(frozen=True, slots=True)
class Admission:
    """A sequence that left the queue in this round."""

    seq: Sequence
    num_cached_tokens: int
    """Leading tokens found in the cache."""


@dataclass(frozen=True, slots=True)
class Preemption:
    """A sequence that lost its blocks in this round and went back to the queue."""

    seq: Sequence
    lost_tokens: int
    """Positions that must be computed again."""


@dataclass(frozen=True, slots=True)
class StateWork:
    """What a round does with state slots; empty for models without a `StateBlock`.

    Its order around the forward is that of `contract.runner.StateBlock`.
    """

    clears: tuple[int, ...] = ()
    """Slots of sequences that start at position 0."""
    restores: tuple[tuple[int, int], ...] = ()
    """Before the forward, (snapshot, slot of the sequence that restarts there)."""
    saves: tuple[tuple[int, int], ...] = ()
    """After the forward, (slot of a sequence at a boundary, snapshot)."""


NO_STATE_WORK = StateWork()


@dataclass(frozen=True, slots=True)
class SchedulerOutputs:
    """What one round computes."""

    step: Step
    batch: tuple[SequenceMetadata, ...]
    seqs: tuple[Sequence, ...]
    """The sequences of `batch`, in its order."""
    sampled: tuple[int, ...]
    """Indices in `batch` of the sequences that sample a token, in the order of their rows."""
    num_batched_tokens: int
    """Positions of the whole batch."""
    num_prefill_tokens: int
    """Positions in parts longer than one."""
    copies: tuple[tuple[int, int], ...]
    """Blocks to copy before the forward, (source, target)."""
    states: StateWork
    """What to do with state slots around the forward."""
    admissions: tuple[Admission, ...]
    preemptions: tuple[Preemption, ...]


class RoundBuilder:
    """The round that is being planned."""

    def __init__(self, step: Step, budget: int) -> None:
        """Args: the round's number, and the most positions that it may compute."""
        self.step = step
        self.budget = budget
        """Positions left."""
        self.promised = 0
        """Blocks in flight that sequences left out of this round already wait for."""
        self.admissions: list[Admission] = []
        self.preemptions: list[Preemption] = []
        self._batch: list[SequenceMetadata] = []
        self._seqs: list[Sequence] = []
        self._sampled: list[int] = []
        self._num_prefill = 0
        self._num_tokens = 0

    def add_decode(self, seq: Sequence) -> None:
        """Add the next single position of a sequence; its input may still be in flight."""
        start = seq.num_computed
        known = start < len(seq.tokens)
        token_ids = (seq.tokens[start],) if known else _UNKNOWN
        self._submit(seq, token_ids, None if known else seq.inflight_row, sample=True)

    def add_chunk(self, seq: Sequence, count: int) -> None:
        """Add the next `count` known positions of a sequence."""
        start, end = seq.num_computed, seq.num_computed + count
        self._submit(seq, tuple(seq.tokens[start:end]), None, sample=end == len(seq.tokens))
        self._num_prefill += count if count > 1 else 0

    def freeze(
        self, copies: tuple[tuple[int, int], ...], states: StateWork = NO_STATE_WORK
    ) -> SchedulerOutputs:
        """The finished plan."""
        return SchedulerOutputs(
            step=self.step,
            batch=tuple(self._batch),
            seqs=tuple(self._seqs),
            sampled=tuple(self._sampled),
            num_batched_tokens=self._num_tokens,
            num_prefill_tokens=self._num_prefill,
            copies=copies,
            states=states,
            admissions=tuple(self.admissions),
            preemptions=tuple(self.preemptions),
        )

    @property
    def seqs(self) -> tuple[Sequence, ...]:
        """The sequences of the round so far."""
        return tuple(self._seqs)

    @property
    def empty(self) -> bool:
        """Whether nothing is to be computed."""
        return not self._batch

    def _submit(
        self, seq: Sequence, token_ids: tuple[int, ...], prev_row: int | None, *, sample: bool
    ) -> None:
        start, count = seq.num_computed, len(token_ids)
        end = start + count
        if seq.wants_prompt_logprobs and seq.prompt_logprobs_next < end:
            meta = _with_prompt_logprobs(seq, token_ids, prev_row, sample)
            seq.request_prompt_logprobs(end)
        else:
            meta = SequenceMetadata(
                seq.seq_id,
                start,
                token_ids,
                prev_row,
                seq.block_table,
                sample,
                state_from=seq.state_from,
                history_from=seq.history_from,
                earlier_tokens=seq.earlier_tokens() if seq.state_from else (),
                state_slot=seq.state_slot,
            )
        if sample:
            seq.planned(self.step, end, len(self._sampled))
            self._sampled.append(len(self._seqs))
        else:
            seq.planned(self.step, end, None)
        self._batch.append(meta)
        self._seqs.append(seq)
        self._num_tokens += count
        self.budget -= count


def _with_prompt_logprobs(
    seq: Sequence, token_ids: tuple[int, ...], prev_row: int | None, sample: bool
) -> SequenceMetadata:
    end = seq.num_computed + len(token_ids)
    return SequenceMetadata(
        seq.seq_id,
        seq.num_computed,
        token_ids,
        prev_row,
        seq.block_table,
        sample,
        prompt_logprobs_from=seq.prompt_logprobs_next,
        next_prompt_token=seq.tokens[end] if end < seq.num_prompt else None,
        num_prompt_top_logprobs=seq.request.params.top_logprobs,
        state_slot=seq.state_slot,
    )
