"""`LLMEngine`: runs requests, one round per `step`.

The only caller of the scheduler and the worker. Round n is planned and launched before the result
of round n-1 is known; while forward n runs, `step` accounts for n-1, and the rows of n are made
after that. A request lives from `add_request` until its last block is released.
"""

import itertools
import time
from collections.abc import Callable
from typing import Any

from services.common.errors import AlreadyExistsError, FleetError, ResourceExhaustedError
from services.common.retry_after import retry_after_s
from services.engine.contract.config import EngineConfig
from services.engine.contract.messages import (
    AddRequest,
    CacheEvent,
    Load,
    Mark,
    RequestFailure,
    StoredBlocks,
    Verb,
)
from services.engine.contract.runner import ExpertPlacement, RunnerInfo, SampledToken
from services.engine.core.constraints import Constraints, advance
from services.engine.core.deadlines import check_deadline
from services.engine.core.endings import Ending, ending_after
from services.engine.core.expert_control import ExpertControl, PlacementNews
from services.engine.core.failures import DEADLINE_PASSED, NO_TOKEN_LEFT, NOT_FINITE, Failure
from services.engine.core.open_requests import OpenRequests
from services.engine.core.request_checks import Limits, request_from
from services.engine.core.step_result import StepResult, keep_prompt_logprobs, refusal_failure
from services.engine.core.timing import RoundTimer
from services.engine.core.worker import CollectedRound, Worker
from services.engine.scheduling.kv_cache import CacheEngine, KVCacheManager
from services.engine.scheduling.scheduler import Scheduler
from services.engine.scheduling.scheduler_outputs import SchedulerOutputs
from services.engine.scheduling.sequence import Request, Sequence, SequenceStatus


class LLMEngine:
    """See the module docstring. Not thread-safe: one thread calls all methods."""

    def __init__(
        self,
        config: EngineConfig,
        worker: Worker,
        limits: Limits,
        now_ns: Callable[[], int] = time.time_ns,
        constraints: Constraints | None = None,
    ) -> None:
        """Args:
        worker: has allocated the blocks that `limits` describes; `close` ends it.
        now_ns: Unix time.
        constraints: None serves no constraint.
        """
        memory = limits.memory
        self._blocks = memory.make_blocks(limits.info, prefix_cache=config.prefix_cache)
        self._cache = CacheEngine(self._blocks)
        self.scheduler = Scheduler(
            self._blocks,
            self._cache,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            policy=config.policy,
        )
        self.worker = worker
        self._experts = ExpertControl(worker)
        self._limits = limits
        self._constraints = constraints or Constraints()
        self._max_waiting = config.max_waiting
        self._now_ns = now_ns
        self._timer = RoundTimer(self._now_s, sample_tokens=config.max_num_batched_tokens // 2)
        self._requests = OpenRequests()
        self._arrivals = itertools.count()
        self._seq_ids = itertools.count()
        self._result = StepResult()

    # One round

    def step(self) -> StepResult:
        """Run one round; returns the result of the round before it.

        If an interrupt cut the last step short, that step is completed instead.
        """
        if self.worker.interrupted:
            return self.flush_inflight_reqs()
        self._housekeep()
        plan = self.scheduler.schedule()
        self._note_plan(plan)
        if not plan.batch:
            return self.flush_inflight_reqs()
        self.worker.launch(plan)  # forward n runs from here on
        self._account_for(self.worker.collect())  # round n-1: tokens, ends, blocks
        self.worker.sample()  # sampling n follows forward n, with the rows exact now
        return self._take_result()

    def flush_inflight_reqs(self) -> StepResult:
        """Collect all rounds in flight without launching another; two after an interrupt."""
        self._account_for(self.worker.collect())
        if self.worker.interrupted:
            self.worker.sample()
            self._account_for(self.worker.collect())
        return self._take_result()

    def settle(self) -> None:
        """Collect the rounds in flight and free the blocks of a round that was never launched.

        Call it after an error or an interrupt, once all requests are aborted.
        """
        self.flush_inflight_reqs()
        for request in self._cache.drop_planned():
            self._release(request)
        self._take_result()

    def _housekeep(self) -> None:
        """Fail requests past their deadline, take grammars that are built, advance placements."""
        for request in self._requests.expired(self._now_s()):
            self._fail(request, DEADLINE_PASSED)
        for request, failure in self._constraints.poll():
            if failure is None:
                self._end_resumed(request)
            else:
                self._fail(request, failure)
        self._experts.advance_round()

    def _note_plan(self, plan: SchedulerOutputs) -> None:
        """Record admissions, preemptions and prompt chunks."""
        for admission in plan.admissions:
            request = admission.seq.request
            if not request.admitted:
                self._requests.admit(request, admission.num_cached_tokens)
                self._timer.observe_admission()
                self._mark(request, "admit", cached_tokens=admission.num_cached_tokens)
        for preemption in plan.preemptions:
            seq, lost = preemption.seq, preemption.lost_tokens
            self._mark(seq.request, "submit", preempted=True, choice=seq.choice, lost_tokens=lost)
        for seq, meta in zip(plan.seqs, plan.batch, strict=True):
            if meta.start < seq.num_prompt:
                step, tokens = plan.step, len(meta.token_ids)
                self._mark(seq.request, "submit", step=step, start=meta.start, tokens=tokens)

    def _account_for(self, collected: CollectedRound | None) -> None:
        """Take the result of a round: cached blocks, tokens, ends, and requests to release."""
        if collected is None:
            return
        plan, output, device_s = collected
        self._result.step = plan.step
        decodes = plan.num_batched_tokens - plan.num_prefill_tokens
        self._timer.observe_round(plan.num_prefill_tokens, decodes, device_s)
        if output.prompt_logprobs:
            keep_prompt_logprobs(plan, output)
        if output.nan_rows:
            for request in self.scheduler.drop_spoilt(output.nan_blocks):
                self._fail(request, NOT_FINITE)
        else:
            self._register(plan)
        refused = dict.fromkeys(output.empty_rows, NO_TOKEN_LEFT)
        refused |= dict.fromkeys(output.nan_rows, NOT_FINITE)
        for row, index in enumerate(plan.sampled):
            seq = plan.seqs[index]
            if seq.finished:
                continue
            if refused and row in refused:
                self._fail(seq.request, refused[row])
            else:
                self._accept(seq, output.tokens[row])
        for request in self._cache.collected(plan.step):
            self._release(request)

    def _register(self, plan: SchedulerOutputs) -> None:
        """Make the blocks and snapshots of the round reusable; release those before windows."""
        size = self.memory.block_size
        for seq, meta in zip(plan.seqs, plan.batch, strict=True):
            computed = meta.start + len(meta.token_ids)
            if computed >= (seq.num_registered + 1) * size and seq.block_table:
                replaced = self._blocks.register_computed(seq, computed)
                if replaced:
                    self._cache.release(seq.last_step, replaced)
                if self._blocks.window:
                    self._blocks.release_passed(seq, computed)
        self._cache.register_snapshots(plan.step)

    def _accept(self, seq: Sequence, token: SampledToken) -> None:
        """Append a sampled token to its sequence, and end the choice if it is complete."""
        seq.append(token.token_id)
        failure = advance(seq, token.token_id)
        if failure is not None:
            self._fail(seq.request, failure)
            return
        ending = ending_after(seq)
        self._emit(seq, token, ending)
        if ending is not None:
            self._end(seq.request, ending.status, seq.choice)

    # Requests

    def add_request(self, message: AddRequest) -> None:
        """Enqueue a request; its seed must be set.

        Raises:
            FleetError: it is refused, and the engine keeps nothing of it.
        """
        if message.request_key in self._requests:
            raise AlreadyExistsError(f"request key {message.request_key} is in use")
        request = request_from(message, self._limits, next(self._arrivals), self._seq_ids)
        self._constraints.check_served(request)
        self._check_queue()
        rate = self._timer.best_prefill_tokens_per_s
        check_deadline(request, self._now_s(), rate, self.scheduler, self._blocks)
        self._requests.add(request)
        self._mark(request, "enqueue", prompt_tokens=len(request.prompt))
        for seq in request.choices:
            self.scheduler.add(seq)
        if not request.choices:
            self._close_request(request)
            self._release(request)
        elif request.params.constraint is not None:
            self._constraints.hold(request)
        else:
            self._end_resumed(request)

    def refuse(self, request_key: str, error: FleetError) -> None:
        """Report the failure and the release of a request that `add_request` refused."""
        self._result.failures.append(refusal_failure(request_key, error))
        self._result.marks.append(Mark(request_key, "release", self._now_ns()))

    def abort_request(self, request_key: str, choice: int | None = None) -> bool:
        """End a request, or one of its choices, in any state; it produces no further output.

        Returns whether anything was open.
        """
        request = self._requests.find_open(request_key)
        if request is None:
            return False
        self._end(request, SequenceStatus.FINISHED_ABORTED, choice)
        # E.g. the end of a choice that is complete with another engine's tokens.
        self._result.drop_outputs(request_key, choice)
        return True

    def has_unfinished_requests(self) -> bool:
        """Whether `step` has something to do: requests, rounds in flight, results to return."""
        result = self._result
        return bool(self._requests or self.worker.in_flight or result.marks or result.failures)

    def is_stuck(self, result: StepResult) -> bool:
        """Whether a step, by its result, changed nothing and left nothing in flight.

        Open requests then wait for a grammar (`wait_for_grammar`) or for a message.
        """
        return not (self.worker.in_flight or result.step or result.marks)

    @property
    def num_held(self) -> int:
        """Requests that wait for their grammar."""
        return self._constraints.num_held

    def wait_for_grammar(self, timeout_s: float) -> None:
        """Wait until a grammar is built; returns at once if no request waits for one."""
        self._constraints.wait(timeout_s)

    def _check_queue(self) -> None:
        waiting = self._requests.num_waiting
        if waiting >= self._max_waiting + self.scheduler.free_slots:
            raise ResourceExhaustedError(
                f"the queue is full: {waiting} requests wait",
                reason="QUEUE_FULL",
                # Retry once half of the queue has drained.
                retry_after_s=retry_after_s(waiting / 2, self._timer.drain_requests_per_s),
            )

    def _end_resumed(self, request: Request) -> None:
        """End the choices of a new request that are complete with another engine's tokens."""
        for seq in request.choices:
            ending = None if seq.finished else ending_after(seq)
            if ending is not None:
                self._emit(seq, None, ending)
                self._end(request, ending.status, seq.choice)

    def _emit(self, seq: Sequence, token: SampledToken | None, ending: Ending | None) -> None:
        if self._result.add_output(seq, token, ending):
            self._mark(seq.request, "collect", choice=seq.choice, first=True)
        if ending is not None:
            self._mark(seq.request, "collect", choice=seq.choice, end=True, tokens=seq.num_output)

    def _fail(self, request: Request, failure: Failure) -> None:
        self._result.failures.append(RequestFailure(request.key, *failure))
        self._end(request, SequenceStatus.FINISHED_FAILED)

    def _end(self, request: Request, status: SequenceStatus, choice: int | None = None) -> None:
        """End all open choices, or one. Sequences end nowhere else."""
        released = False
        for seq in request.choices:
            if not seq.finished and choice in (None, seq.choice):
                last = request.end_choice()
                released |= self.scheduler.finish(seq, status)
                if last:
                    self._close_request(request)
        if released:
            self._release(request)

    def _close_request(self, request: Request) -> None:
        self._constraints.drop(request)
        self._requests.close(request)

    def _release(self, request: Request) -> None:
        self._requests.release(request)
        self._mark(request, "release")

    def _mark(self, request: Request, verb: Verb, **fields: Any) -> None:
        self._result.marks.append(Mark(request.key, verb, self._now_ns(), **fields))

    def _take_result(self) -> StepResult:
        result, self._result = self._result, StepResult()
        return result

    def _now_s(self) -> float:
        return self._now_ns() / 1e9

    # State of the engine

    @property
    def info(self) -> RunnerInfo:
        """Facts of the model."""
        return self._limits.info

    @property
    def memory(self) -> KVCacheManager:
        """The size of the cache."""
        return self._limits.memory

    @property
    def hash_namespace(self) -> bytes:
        """Root of the hashes of cached blocks."""
        return self._limits.hash_namespace

    @property
    def forward_done(self) -> bool:
        """Whether no forward runs, so that a `step` would start its own at once."""
        return self.worker.forward_done

    def load(self) -> Load:
        """How busy the engine is."""
        timer = self._timer
        return Load(
            waiting_requests=self._requests.num_waiting,
            running_requests=self._requests.num_running,
            uncached_tokens_queued=self.scheduler.uncached_tokens_queued(),
            held_blocks=self._blocks.blocks.num_held,
            total_blocks=self.memory.num_blocks,
            prefill_tokens_per_s=timer.prefill_tokens_per_s,
            decode_round_s=timer.decode_round_s,
            drain_requests_per_s=timer.drain_requests_per_s,
        )

    def drain_cache_events(self) -> list[CacheEvent]:
        """Blocks that became reusable or were evicted since the last call, in order."""
        return self._blocks.drain_events()

    def cache_snapshot(self) -> list[StoredBlocks]:
        """All reusable blocks."""
        return self._blocks.snapshot()

    def set_placement(self, placement: ExpertPlacement) -> None:
        """Load a placement of experts and use it; replaces one that is still being loaded."""
        self._experts.want(placement)

    def owes_expert_loads(self) -> bool:
        """Whether loads of experts were counted that no report had yet."""
        return self._experts.owes_loads

    def take_placement_news(self) -> PlacementNews:
        """The state of the placement, for the next report."""
        return self._experts.take_news()

    def advance_idle(self) -> bool:
        """While no rounds run: check the runner, go on loading a placement, return `has_news`.

        Raises:
            RunnerFailedError: a part of the runner has failed.
        """
        self.worker.check()
        self._experts.advance()
        return self._experts.has_news

    def check_integrity(self) -> None:
        """Check all bookkeeping.

        Raises:
            AssertionError: naming what does not agree.
        """
        self.scheduler.check_integrity()
        self._requests.check_integrity()

    def close(self) -> None:
        """End the worker and the grammar compiler; idempotent."""
        self._constraints.close()
        self.worker.close()
