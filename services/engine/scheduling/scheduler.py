"""Which sequence computes what in the next round. Owns the queues; the only user of the blocks.

There are no phases: each sequence has `num_computed` positions, which must catch up with its
tokens. `_schedule_decode` means "running first", `_schedule_prefill` "then chunks and admission",
both under one budget of positions a round. A sequence holds all blocks of its known tokens from
its admission on (all or nothing), so half-computed prompts can never lock each other out.

Progress: the first in the policy's order can always get its next block, because it may preempt
all behind it and a request that could not fit alone is never let in.
"""

from collections.abc import Iterator
from itertools import islice

from services.engine.scheduling.block_manager import Allocation, BlockManager
from services.engine.scheduling.kv_cache import CacheEngine
from services.engine.scheduling.policies import (
    POLICIES,
    PrefillShare,
    Standing,
    TenantCounters,
    Victim,
    choose_victim,
    choose_victims,
)
from services.engine.scheduling.scheduler_outputs import (
    Admission,
    Preemption,
    RoundBuilder,
    SchedulerOutputs,
    Step,
)
from services.engine.scheduling.sequence import Request, Sequence, SequenceStatus
from services.engine.scheduling.waiting_queue import OrderedSequences, WaitingLines

LOOK_AHEAD = 16
"""Waiting sequences that a round may try to admit; those that are not ready do not count."""
MAX_PASSED_OVER = 32
"""Admissions past a sequence that does not fit; then nobody passes until it fits."""


class Scheduler:
    """Plans rounds; see the module's docstring for the rules."""

    def __init__(
        self,
        block_manager: BlockManager,
        cache: CacheEngine,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        policy: str = "fcfs",
    ) -> None:
        self._blocks = block_manager
        self._cache = cache
        # Each running sequence gets at least one position a round.
        self._max_running = min(max_num_seqs, max_num_batched_tokens)
        self._budget = max_num_batched_tokens
        self._policy = POLICIES[policy]
        self._tenants = TenantCounters()
        self._waiting = WaitingLines(by_tenant=self._policy.by_tenant)
        self._running = OrderedSequences()
        self._step = 0

    @property
    def num_running(self) -> int:
        """Sequences that hold blocks to run."""
        return len(self._running)

    @property
    def free_seats(self) -> int:
        """Sequences that could start at once if there were blocks."""
        return max(0, self._max_running - len(self._running))

    def sequences(self) -> Iterator[Sequence]:
        """All unfinished sequences, running ones first."""
        yield from self._running
        yield from self._waiting

    def uncached_tokens_queued(self) -> int:
        """Prompt tokens that are still to be computed; a decoding sequence has none."""
        return sum(left for seq in self.sequences() if (left := seq.remaining) > 1)

    def add(self, seq: Sequence) -> None:
        """Put a new sequence in the queue."""
        seq.order = self._rank(seq)
        self._tenants.enter(seq.request.tenant)
        self._waiting.add(seq)

    def certain_ahead(self, seq: Sequence) -> list[Sequence]:
        """Whose prompts are computed before that of a new sequence, whatever else arrives.

        Left out: those that it may pass, since they do not fit or wait for a grammar; the long
        ones, of which a short prompt does not wait; other tenants under a policy of turns.
        """
        rank, short = self._rank(seq), seq.remaining <= self._budget
        return [
            other
            for other in self.sequences()
            if other.order < rank
            and _wanted(other) > 1
            and other.blocked_at < 0
            and not other.request.held
            and not (short and other.remaining > self._budget)
            and (not self._policy.by_tenant or other.request.tenant == seq.request.tenant)
        ]

    def finish(self, seq: Sequence, status: SequenceStatus, released: list[Request]) -> None:
        """End a sequence in any state; its blocks go back when no launched round needs them."""
        queue = self._running if seq.status is SequenceStatus.RUNNING else self._waiting
        queue.remove(seq)
        seq.end(status)
        self._tenants.leave(seq.request.tenant)
        self._cache.retire(seq, released)

    def clear_cache(self) -> None:
        """Forget all reusable content, e.g. after values that were not finite."""
        self._blocks.clear(self._running)

    def schedule(self) -> SchedulerOutputs:
        """Plan the next round; an empty batch if nothing can run now."""
        builder = RoundBuilder(Step(self._step + 1), self._budget)
        self._schedule(builder)
        if builder.empty:
            return builder.freeze(())
        self._step += 1
        plan = builder.freeze(self._cache.take_copies(builder.step))
        if self._policy.by_tenant:
            for seq, meta in zip(plan.seqs, plan.batch, strict=True):
                self._tenants.charge(seq.request.tenant, len(meta.token_ids))
        return plan

    def _rank(self, seq: Sequence) -> tuple[int, ...]:
        request = seq.request
        standing = Standing(request.priority, request.arrival, seq.choice, len(seq.tokens))
        return self._policy.order(standing)

    def _schedule(self, builder: RoundBuilder) -> None:
        if self._policy.urgent_preempt:
            self._make_way(builder)
        chunked = self._schedule_decode(builder)
        self._schedule_prefill(builder, chunked)

    def _schedule_decode(self, builder: RoundBuilder) -> list[Sequence]:
        """One position for each running sequence that lacks just one; returns those lacking more.

        A sequence whose token in flight takes it to its limit is left out.
        """
        chunked: list[Sequence] = []
        for seq in self._running.first(len(self._running)):
            if seq.status is not SequenceStatus.RUNNING:
                continue  # preempted by one before it
            length = len(seq.tokens) + seq.inflight
            if length - seq.num_computed > 1:
                chunked.append(seq)
            elif length < seq.max_length and (
                seq.num_computed < seq.capacity or self._make_room(seq, builder)
            ):
                builder.add_decode(seq)
        return chunked

    def _schedule_prefill(self, builder: RoundBuilder, chunked: list[Sequence]) -> None:
        """Chunks of admitted prompts, then admission in order, past those that do not fit."""
        chunked = [seq for seq in chunked if seq.status is SequenceStatus.RUNNING]
        candidates = [] if builder.preemptions else self._candidates()
        contenders = [_wanted(seq) for seq in (*chunked, *candidates)]
        share = PrefillShare(contenders, builder.budget)
        later = self._outranked(chunked, candidates)
        for seq in chunked[: len(chunked) - len(later)]:
            self._take_chunk(seq, share, builder)
        self._admit(candidates, share, builder)
        for seq in later:
            self._take_chunk(seq, share, builder)

    def _outranked(self, chunked: list[Sequence], candidates: list[Sequence]) -> list[Sequence]:
        """Of the half-computed prompts, those that let one which waits go first."""
        if not (self._policy.urgent_preempt and candidates):
            return []
        priority = candidates[0].request.priority
        return [seq for seq in chunked if seq.request.priority < priority]

    def _admit(
        self, candidates: list[Sequence], share: PrefillShare, builder: RoundBuilder
    ) -> None:
        blocked: list[Sequence] = []
        for seq in candidates:
            if not share.left or self.num_running >= self._max_running:
                return
            if share.offer(_wanted(seq)):
                self._try_admit(seq, share, builder, blocked)
            if blocked and blocked[0].passed_over >= MAX_PASSED_OVER:
                return

    def _candidates(self) -> list[Sequence]:
        if self.num_running >= self._max_running:
            return []
        ordered = self._waiting.candidates(self._tenants.counts, _ready, _wanted)
        return list(islice(ordered, LOOK_AHEAD))

    def _try_admit(
        self, seq: Sequence, share: PrefillShare, builder: RoundBuilder, blocked: list[Sequence]
    ) -> None:
        allocation = None
        if seq.blocked_at != self._blocks.version:
            allocation = self._allocate(seq, builder.step)
        if allocation is None:
            seq.blocked_at = self._blocks.version
            blocked.append(seq)
            return
        for earlier in blocked:
            earlier.passed_over += 1
        if allocation.copy is not None:
            self._cache.copy(*allocation.copy)
        self._waiting.remove(seq)
        self._running.add(seq)
        seq.status = SequenceStatus.RUNNING
        seq.fork_of = None
        seq.passed_over = 0
        seq.admissions += 1
        builder.admissions.append(Admission(seq, allocation.num_computed))
        self._take_chunk(seq, share, builder)

    def _allocate(self, seq: Sequence, step: Step) -> Allocation | None:
        parent = self._computed_parent(seq)
        if parent is None:
            return self._blocks.try_allocate_seq(seq, self._headroom)
        # Copies come before the forward: what this very round writes cannot be copied.
        if parent.prompt_step == step:
            return None
        return self._blocks.try_fork_seq(seq, parent, self._headroom)

    @property
    def _headroom(self) -> int:
        """Blocks that stay free for those that run, or they would preempt whom we let in."""
        return min(len(self._running), self._blocks.blocks.num_blocks // 32)

    @staticmethod
    def _computed_parent(seq: Sequence) -> Sequence | None:
        """The choice whose prompt it can share, if that holds all of it."""
        parent = seq.fork_of
        if parent is None or not parent.block_table or parent.num_computed < seq.num_prompt:
            return None
        return parent

    def _take_chunk(self, seq: Sequence, share: PrefillShare, builder: RoundBuilder) -> None:
        remaining = seq.remaining
        count = share.offer(remaining)
        if count:
            share.take(remaining, count)
            builder.add_chunk(seq, count)

    def _make_room(self, seq: Sequence, builder: RoundBuilder) -> bool:
        """The next block for a running sequence; False if it must sit this round out."""
        while not self._blocks.grow(seq):
            if builder.promised < self._cache.num_pending:
                builder.promised += 1
                return False
            victim = self._victim_for(seq)
            if victim is None:
                return False
            self._preempt(victim, builder)
        return True

    def _victim_for(self, seq: Sequence) -> Sequence | None:
        behind = {other.seq_id: other for other in self._running.after(seq)}
        chosen = choose_victim([self._as_victim(other) for other in behind.values()])
        return None if chosen is None else behind[chosen]

    def _as_victim(self, seq: Sequence) -> Victim:
        return Victim(
            seq_id=seq.seq_id,
            priority=seq.request.priority,
            lost_tokens=seq.num_computed,
            freed_blocks=self._blocks.num_sole(seq.block_table),
            arrival=seq.request.arrival,
        )

    def _make_way(self, builder: RoundBuilder) -> None:
        """Preempt for the first in the queue, if it outranks running ones and needs their place.

        Their blocks come back with the rounds in flight, so it is admitted in the round after.
        """
        head = next(self._waiting.candidates(self._tenants.counts, _ready, _wanted), None)
        if head is None:
            return
        lower = {s.seq_id: s for s in self._running if s.request.priority < head.request.priority}
        if not lower:
            return
        seats = len(self._running) + 1 - self._max_running
        parent = self._computed_parent(head)
        blocks = self._blocks.num_missing(head, parent, self._headroom) - self._cache.num_pending
        for chosen in choose_victims([self._as_victim(s) for s in lower.values()], seats, blocks):
            self._preempt(lower[chosen], builder)

    def _preempt(self, seq: Sequence, builder: RoundBuilder) -> None:
        """Back to the queue; its blocks go back when no launched round can write to them."""
        builder.preemptions.append(Preemption(seq, seq.num_computed))
        self._running.remove(seq)
        self._cache.retire(seq, builder.released)
        seq.reset_for_recompute()
        self._waiting.add(seq)

    def check_integrity(self) -> None:
        """Compare blocks, tables and queues with one another.

        Raises:
            AssertionError: naming what does not agree.
        """
        seqs = list(self.sequences())
        tables = [seq.block_table for seq in seqs]
        self._blocks.check_integrity([*tables, *self._cache.held_tables()])
        for seq in self._running:
            assert seq.status is SequenceStatus.RUNNING, f"{seq.seq_id} runs as {seq.status}"
            assert seq.num_computed <= seq.capacity, f"{seq.seq_id} computed past its blocks"
        for seq in self._waiting:
            assert seq.status is SequenceStatus.WAITING, f"{seq.seq_id} waits as {seq.status}"
            assert not seq.block_table, f"{seq.seq_id} waits with blocks"


def _ready(seq: Sequence) -> bool:
    """A fork waits until the choice that it shares a prompt with has submitted that; all choices
    of a constrained request wait for its grammar."""
    if seq.request.held:
        return False
    parent = seq.fork_of
    return parent is None or parent.prompt_step > 0 or parent.finished


def _wanted(seq: Sequence) -> int:
    """Positions that it would compute, as far as can be told before it has blocks."""
    return seq.remaining if seq.fork_of is None or seq.fork_of.finished else 1
