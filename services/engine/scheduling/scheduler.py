"""`Scheduler`: decides which sequence computes what in the next round; owns the queues.

There are no phases: each sequence has `num_computed` positions, which must catch up with its
tokens. `_schedule_decode` handles running sequences first; `_schedule_prefill` then handles chunks
of prompts and admission. Both share one budget of positions per round. A sequence gets the blocks
of all its known tokens at admission, all or nothing, so partly computed prompts cannot deadlock.

Progress: the first sequence in the policy's order can always get its next block, because it may
preempt all sequences behind it, and a request that does not fit alone is refused on arrival.
"""

from collections.abc import Collection, Iterator
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
"""Most waiting sequences that one round tries to admit; those that are not ready do not count."""
MAX_PASSED_OVER = 32
"""Most later sequences admitted before one that does not fit; then all wait until it fits."""


class Scheduler:
    """Plans rounds; see the module docstring for the rules."""

    def __init__(
        self,
        block_manager: BlockManager,
        cache: CacheEngine,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        policy: str = "fcfs",
    ) -> None:
        """Args:
        max_num_seqs: most sequences running at once.
        max_num_batched_tokens: most positions computed in one round.
        policy: a key of `POLICIES`.
        """
        self._blocks = block_manager
        self._cache = cache
        # Each running sequence computes at least one position per round, and has a slot of state.
        slots = block_manager.num_states or max_num_seqs
        self._max_running = min(max_num_seqs, max_num_batched_tokens, slots)
        self._budget = max_num_batched_tokens
        self._policy = POLICIES[policy]
        self._tenants = TenantCounters()
        self._waiting = WaitingLines(by_tenant=self._policy.by_tenant)
        self._running = OrderedSequences()
        self._step = 0

    @property
    def num_running(self) -> int:
        """Sequences that are admitted."""
        return len(self._running)

    @property
    def max_running(self) -> int:
        """Most sequences that can run at once; less than `max_num_seqs` if something is scarcer."""
        return self._max_running

    @property
    def free_slots(self) -> int:
        """Sequences that could be admitted now if there were blocks for them."""
        return max(0, self._max_running - len(self._running))

    def sequences(self) -> Iterator[Sequence]:
        """All unfinished sequences, running ones first."""
        yield from self._running
        yield from self._waiting

    def uncached_tokens_queued(self) -> int:
        """Prompt tokens still to be computed; a decoding sequence has none."""
        return sum(left for seq in self.sequences() if (left := seq.remaining) > 1)

    def add(self, seq: Sequence) -> None:
        """Put a new sequence in the queue."""
        seq.enter(self._rank(seq))
        self._tenants.enter(seq.request.tenant)
        self._waiting.add(seq)

    def certain_ahead(self, seq: Sequence) -> list[Sequence]:
        """Sequences whose prompts are computed before that of a new one, even if more arrive.

        Not included: sequences that it may pass, because they do not fit or wait for a grammar or
        another choice; prompts longer than a round's budget, if its own is shorter; other tenants,
        if the policy lets tenants take turns.
        """
        rank, short = self._rank(seq), seq.remaining <= self._budget
        return [
            other
            for other in self.sequences()
            if other.order < rank
            and self._wanted(other) > 1
            and other.blocked_at is None
            and _ready(other)
            and not (short and other.remaining > self._budget)
            and (not self._policy.by_tenant or other.request.tenant == seq.request.tenant)
        ]

    def finish(self, seq: Sequence, status: SequenceStatus) -> bool:
        """End a sequence in any state; its blocks are freed once no launched round uses them.

        Returns whether this was the last block of its request: the request can be released.
        """
        queue = self._running if seq.status is SequenceStatus.RUNNING else self._waiting
        queue.remove(seq)
        seq.end(status)
        self._tenants.leave(seq.request.tenant)
        return self._cache.retire(seq)

    def clear_cache(self) -> None:
        """Drop all reusable content."""
        self._blocks.clear(self._running)

    def drop_spoilt(self, blocks: Collection[int]) -> list[Request]:
        """Drop all reusable content after the model produced values that are not finite.

        Any block may have some, so no cached content can be trusted.

        Args:
            blocks: those in which some were found and replaced by 0.

        Returns the requests that hold one of these, which must end: e.g. a prompt of which a chunk
        is computed and no token is sampled yet.
        """
        self.clear_cache()
        spoilt = [seq.request for seq in self._running if not {*seq.block_table}.isdisjoint(blocks)]
        return list({request.key: request for request in spoilt}.values())

    def schedule(self) -> SchedulerOutputs:
        """Plan the next round; its batch is empty if nothing can run now."""
        builder = RoundBuilder(Step(self._step + 1), self._budget)
        self._schedule(builder)
        if builder.empty:
            return builder.freeze(())
        self._step += 1
        plan = builder.freeze(
            self._cache.take_copies(builder.step),
            self._cache.take_state_work(builder.step, builder.seqs),
        )
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
        """Add one position of each running sequence that lacks one; return those that lack more.

        A sequence that reaches its length limit with the token in flight is left out.
        """
        chunked: list[Sequence] = []
        for seq in self._running.first(len(self._running)):
            if seq.status is not SequenceStatus.RUNNING:
                continue  # preempted for a sequence before it
            length = len(seq.tokens) + seq.inflight
            if length - seq.num_computed > 1:
                chunked.append(seq)
            elif length < seq.max_length and (
                seq.num_computed < seq.capacity or self._make_room(seq, builder)
            ):
                builder.add_decode(seq)
        return chunked

    def _schedule_prefill(self, builder: RoundBuilder, chunked: list[Sequence]) -> None:
        """Add chunks of admitted prompts, then admit in order, passing those that do not fit."""
        chunked = [seq for seq in chunked if seq.status is SequenceStatus.RUNNING]
        candidates = [] if builder.preemptions else self._candidates()
        contenders = [self._wanted(seq) for seq in (*chunked, *candidates)]
        share = PrefillShare(contenders, builder.budget)
        later = self._outranked(chunked, candidates)
        for seq in chunked[: len(chunked) - len(later)]:
            self._add_chunk(seq, share, builder)
        self._admit(candidates, share, builder)
        for seq in later:
            self._add_chunk(seq, share, builder)

    def _outranked(self, chunked: list[Sequence], candidates: list[Sequence]) -> list[Sequence]:
        """Partly computed prompts of lower priority than the first waiting sequence, if urgent."""
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
            if not share.offer(self._wanted(seq)):
                continue
            if self._try_admit(seq, share, builder):
                for earlier in blocked:
                    earlier.pass_over()
            else:
                blocked.append(seq)
            if blocked and blocked[0].passed_over >= MAX_PASSED_OVER:
                return

    def _candidates(self) -> list[Sequence]:
        if self.num_running >= self._max_running:
            return []
        ordered = self._waiting.candidates(self._tenants.counts, _ready, self._wanted)
        return list(islice(ordered, LOOK_AHEAD))

    def _try_admit(self, seq: Sequence, share: PrefillShare, builder: RoundBuilder) -> bool:
        """Admit a sequence with its first chunk; False if there are no blocks for it."""
        allocation = None
        if seq.blocked_at != self._blocks.version:
            allocation = self._allocate(seq, builder.step)
        if allocation is None:
            seq.block(self._blocks.version)
            return False
        if allocation.copy is not None:
            self._cache.copy(*allocation.copy)
        self._waiting.remove(seq)
        self._running.add(seq)
        seq.admit()
        builder.admissions.append(Admission(seq, allocation.num_computed))
        self._add_chunk(seq, share, builder)
        return True

    def _wanted(self, seq: Sequence) -> int:
        """Positions that a sequence would compute, estimated before it has blocks."""
        parent = seq.fork_of
        shares = parent is not None and not parent.finished and self._blocks.shares_prompt(parent)
        return 1 if shares else seq.remaining

    def _allocate(self, seq: Sequence, step: Step) -> Allocation | None:
        parent = self._computed_parent(seq)
        if parent is None:
            return self._blocks.try_allocate_seq(seq, self._headroom)
        # Blocks are copied before the forward, so what this round writes cannot be copied yet.
        if parent.prompt_step == step:
            return None
        return self._blocks.try_fork_seq(seq, parent, self._headroom)

    @property
    def _headroom(self) -> int:
        """Blocks kept free for running sequences; otherwise they would soon preempt the new one."""
        return min(len(self._running), self._blocks.blocks.num_blocks // 32)

    def _computed_parent(self, seq: Sequence) -> Sequence | None:
        """The choice whose prompt blocks it can share, if they cover the whole prompt."""
        parent = seq.fork_of
        if parent is None or not parent.block_table or parent.num_computed < seq.num_prompt:
            return None
        return parent if self._blocks.shares_prompt(parent) else None

    def _add_chunk(self, seq: Sequence, share: PrefillShare, builder: RoundBuilder) -> None:
        remaining = seq.remaining
        count = self._blocks.cut_chunk(seq, share.offer(remaining))
        if count:
            share.take(remaining, count)
            builder.add_chunk(seq, count)

    def _make_room(self, seq: Sequence, builder: RoundBuilder) -> bool:
        """Give a running sequence its next block; False if it must wait for a later round."""
        while not self._blocks.grow(seq):
            # A block that comes back with a round in flight is cheaper than a preemption.
            if builder.promised < self._cache.num_pending:
                builder.promised += 1
                return False
            victim = self._choose_victim(seq)
            if victim is None:
                return False
            self._preempt(victim, builder)
        return True

    def _choose_victim(self, seq: Sequence) -> Sequence | None:
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
        """Preempt sequences of lower priority if the first waiting one needs their slot or blocks.

        Their blocks come back with the rounds in flight, so it is admitted in the next round.
        """
        waiting = self._waiting.candidates(self._tenants.counts, _ready, self._wanted)
        head = next(waiting, None)
        if head is None:
            return
        lower = {s.seq_id: s for s in self._running if s.request.priority < head.request.priority}
        if not lower:
            return
        slots = len(self._running) + 1 - self._max_running
        states = self._blocks.num_missing_states - self._cache.num_pending_states
        parent = self._computed_parent(head)
        blocks = self._blocks.num_missing(head, parent, self._headroom) - self._cache.num_pending
        victims = [self._as_victim(seq) for seq in lower.values()]
        for chosen in choose_victims(victims, max(slots, states), blocks):
            self._preempt(lower[chosen], builder)

    def _preempt(self, seq: Sequence, builder: RoundBuilder) -> None:
        """Move a sequence to the queue; its blocks are freed once no launched round uses them."""
        builder.preemptions.append(Preemption(seq, seq.num_computed))
        self._running.remove(seq)
        self._cache.retire(seq)
        seq.preempt()
        self._waiting.add(seq)

    def check_integrity(self) -> None:
        """Check that blocks, slots of state, tables and queues agree.

        Raises:
            AssertionError: naming the sequence or block at fault.
        """
        seqs = list(self.sequences())
        tables = [seq.block_table for seq in seqs]
        slots = [seq.state_slot for seq in seqs if seq.state_slot]
        self._blocks.check_integrity(
            [*tables, *self._cache.held_tables()], [*slots, *self._cache.held_states()]
        )
        for seq in self._running:
            has_slot = self._blocks.states is not None
            assert bool(seq.state_slot) == has_slot, f"{seq.seq_id} runs with {seq.state_slot=}"
            held = [block > 0 for block in seq.block_table]
            assert held == sorted(held), f"{seq.seq_id} lacks a block in its window"
            assert held.count(False) == seq.num_released, f"{seq.seq_id}: {seq.num_released=}"
            assert seq.status is SequenceStatus.RUNNING, f"{seq.seq_id} runs as {seq.status}"
            assert seq.num_computed <= seq.capacity, f"{seq.seq_id} computed past its blocks"
        for seq in self._waiting:
            assert seq.status is SequenceStatus.WAITING, f"{seq.seq_id} waits as {seq.status}"
            assert not seq.block_table, f"{seq.seq_id} waits with blocks"
            assert not seq.state_slot, f"{seq.seq_id} waits with a slot"


def _ready(seq: Sequence) -> bool:
    """Whether a sequence can be admitted: its grammar is built, and the choice whose prompt it
    shares has submitted that prompt."""
    if seq.request.held:
        return False
    parent = seq.fork_of
    return parent is None or parent.prompt_step > 0 or parent.finished
