"""`LLMEngine`: a request's life from `add_request` to its release, one `step` a round.

The only caller of scheduler and worker. The results of round n-1 come back while round n's forward
runs: each round is scheduled on what is known, and what n-1 changes is put right when it is known.
"""

import time
from collections.abc import Callable

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
)
from services.engine.contract.runner import RunnerInfo, SampledToken, SamplerOutput
from services.engine.core.constraints import Constraints, Failure, advance
from services.engine.core.deadlines import Deadlines, refusal
from services.engine.core.endings import ending_after
from services.engine.core.expert_control import ExpertControl
from services.engine.core.request_checks import Limits
from services.engine.core.step_result import StepResult, keep_prompt_logprobs
from services.engine.core.timing import RoundTimer
from services.engine.core.worker import Worker
from services.engine.scheduling.block_manager import BlockManager
from services.engine.scheduling.kv_cache import CacheEngine, KVCacheManager
from services.engine.scheduling.scheduler import Scheduler
from services.engine.scheduling.scheduler_outputs import SchedulerOutputs
from services.engine.scheduling.sequence import Request, Sequence, SequenceStatus

_DEADLINE = Failure(
    "DEADLINE_EXCEEDED", "DEADLINE_EXCEEDED", "the deadline passed before the answer"
)
_NAN = Failure("DATA_LOSS", "NAN_LOGITS", "the model produced values that are not finite")
_NO_TOKEN = Failure(
    "FAILED_PRECONDITION",
    "CONSTRAINT_UNSATISFIABLE",
    "the request's masks and constraints leave no token to draw",
)


class LLMEngine:
    """See the module's docstring. Not thread-safe: one thread calls everything."""

    def __init__(
        self,
        config: EngineConfig,
        worker: Worker,
        limits: Limits,
        now_ns: Callable[[], int] = time.time_ns,
        constraints: Constraints | None = None,
    ) -> None:
        memory = limits.memory
        self._blocks = BlockManager(
            memory.num_blocks, memory.block_size, prefix_cache=config.prefix_cache
        )
        self._cache = CacheEngine(self._blocks)
        self.scheduler = Scheduler(
            self._blocks,
            self._cache,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            policy=config.policy,
        )
        self.worker = worker
        self.experts = ExpertControl(worker)
        self.limits = limits
        self.constraints = constraints or Constraints()
        self._max_waiting = config.max_waiting
        self._now_ns = now_ns
        self._timer = RoundTimer(self._now_s, telling_tokens=config.max_num_batched_tokens // 2)
        self._requests: dict[str, Request] = {}
        self._deadlines = Deadlines()
        self._num_waiting = 0
        self._num_open = 0
        self._next_arrival = 0
        self._next_seq_id = 0
        self._result = StepResult()

    @property
    def info(self) -> RunnerInfo:
        """Facts of the model."""
        return self.limits.info

    @property
    def memory(self) -> KVCacheManager:
        """The decided size of the cache."""
        return self.limits.memory

    def has_unfinished_requests(self) -> bool:
        """Whether `step` has something to do: work, outcomes in flight, or results to return."""
        result = self._result
        return bool(self._requests or self.worker.in_flight or result.marks or result.failures)

    def add_request(self, message: AddRequest) -> None:
        """Enqueue a request; `message.params.seed` is set.

        Raises:
            FleetError: it is refused; nothing of it is kept.
        """
        if message.request_key in self._requests:
            raise AlreadyExistsError(f"request key {message.request_key} is in use")
        request = self.limits.make_request(message, self._next_arrival)
        self.constraints.check_served(request)
        if self._num_waiting >= self._max_waiting + self.scheduler.free_seats:
            raise ResourceExhaustedError(
                f"{self._num_waiting} requests wait already",
                reason="QUEUE_FULL",
                # A place in the queue is free once half of it has drained.
                retry_after_s=retry_after_s(
                    self._num_waiting / 2, self._timer.drain_requests_per_s
                ),
            )
        self._make_choices(request, message)
        self._check_deadline(request)
        self._next_arrival += 1
        self._requests[request.key] = request
        self._num_waiting += 1
        self._num_open += 1
        self._deadlines.watch(request, self._num_open)
        self._mark(request, "enqueue", prompt_tokens=len(request.prompt))
        self._add_choices(request)

    def refuse(self, request_key: str, error: FleetError) -> None:
        """Tell of a request that `add_request` refused: its failure and its release."""
        failure = RequestFailure(
            request_key=request_key,
            code=error.code.name,
            reason=error.reason,
            message=error.message,
            field=error.violations[0].field if error.violations else None,
            retry_after_s=error.retry_after_s,
        )
        self._result.failures.append(failure)
        self._result.marks.append(Mark(request_key, "release", self._now_ns()))

    def abort_request(self, request_key: str, choice: int | None = None) -> bool:
        """End a request, or one of its choices, in any state; nothing more is said of it.

        Returns whether there was something to end.
        """
        request = self._requests.get(request_key)
        if request is None or request.open_choices == 0:
            return False
        self._end(request, SequenceStatus.FINISHED_ABORTED, choice)
        self._result.forget(request_key, choice)  # e.g. an end that another engine's tokens made
        return True

    def step(self) -> StepResult:
        """One round; returns the results of the round before it, while this one's forward runs.

        If an interrupt cut the last step's wait short, that step is ended first.
        """
        if self.worker.interrupted:
            return self.flush_inflight_reqs()
        self._expire()
        self._take_grammars()
        self.experts.advance()
        plan = self.scheduler.schedule()
        self._note_plan(plan)
        if not plan.batch:
            return self.flush_inflight_reqs()
        return self._execute_model_async_step(plan)

    def flush_inflight_reqs(self) -> StepResult:
        """Collect the round in flight without launching another."""
        self.worker.flush(self._process_model_outputs)
        return self._take_result()

    def settle(self) -> None:
        """After an error or an interrupt, with every request aborted: collect what is in flight,
        and give back what a round holds that was planned and never launched."""
        self.flush_inflight_reqs()
        for request in self._cache.forget_planned():
            self._release(request)
        self._take_result()

    def load(self) -> Load:
        """How busy the engine is."""
        timer = self._timer
        return Load(
            waiting_requests=self._num_waiting,
            running_requests=self._num_open - self._num_waiting,
            uncached_tokens_queued=self.scheduler.uncached_tokens_queued(),
            held_blocks=self._blocks.blocks.num_held,
            total_blocks=self.memory.num_blocks,
            prefill_tokens_per_s=timer.prefill_tokens_per_s,
            decode_round_s=timer.decode_round_s,
            drain_requests_per_s=timer.drain_requests_per_s,
        )

    def drain_cache_events(self) -> list[CacheEvent]:
        """What became reusable or ceased to be since the last call."""
        return self._blocks.drain_events()

    def cache_snapshot(self) -> list[StoredBlocks]:
        """All reusable blocks."""
        return self._blocks.snapshot()

    def check_integrity(self) -> None:
        """Compare all bookkeeping; raises AssertionError."""
        self.scheduler.check_integrity()
        open_requests = [r for r in self._requests.values() if r.open_choices]
        assert len(open_requests) == self._num_open, "open requests are miscounted"
        waiting = sum(not r.admitted for r in open_requests)
        assert waiting == self._num_waiting, "waiting requests are miscounted"
        for request in self._requests.values():
            assert request.unreleased_choices > 0, f"{request.key} was released but is kept"

    def close(self) -> None:
        """End the worker and the grammar compiler; idempotent."""
        self.constraints.close()
        self.worker.close()

    def _execute_model_async_step(self, plan: SchedulerOutputs) -> StepResult:
        self.worker.execute_model_step(plan, self._process_model_outputs)
        return self._take_result()

    def _take_result(self) -> StepResult:
        result, self._result = self._result, StepResult()
        return result

    def _make_choices(self, request: Request, message: AddRequest) -> None:
        run = [c for c in range(request.params.n) if c not in message.finished_choices]
        for choice in run:
            continued = message.continued[choice] if choice < len(message.continued) else []
            seq = Sequence(self._next_seq_id, request, choice, tuple(continued))
            self._next_seq_id += 1
            request.choices.append(seq)
            if choice != run[0] and not any(message.continued):
                seq.fork_of = request.choices[0]
        request.open_choices = request.unreleased_choices = len(request.choices)

    def _check_deadline(self, request: Request) -> None:
        """Raises the refusal of a request that cannot have its first token in time."""
        if request.deadline_unix_s is None or not request.choices:
            return
        seq, rate = request.choices[0], self._timer.best_prefill_tokens_per_s
        left_s = request.deadline_unix_s - self._now_s()
        most = self.scheduler.uncached_tokens_queued()
        if refusal(left_s, len(seq.tokens), most, rate) is None:
            return  # not even if nothing of it all is cached
        ahead = self.scheduler.certain_ahead(seq)
        own = self._blocks.count_uncached([seq])
        both = self._blocks.count_uncached([*ahead, seq])
        error = refusal(left_s, own, both - own, rate)
        if error is not None:
            raise error

    def _add_choices(self, request: Request) -> None:
        for seq in request.choices:
            self.scheduler.add(seq)
        if not request.choices:
            self._close_request(request)
            self._release(request)
        elif request.params.constraint is not None:
            self.constraints.hold(request)
        else:
            self._end_continued(request)

    def _take_grammars(self) -> None:
        for request, failure in self.constraints.poll():
            if failure is None:
                self._end_continued(request)
            else:
                self._fail(request, failure)

    def _end_continued(self, request: Request) -> None:
        """End the choices that are complete with what another engine generated."""
        for seq in request.choices:
            ending = None if seq.finished else ending_after(seq)
            if ending is not None:
                self._emit(seq, None, ending.reason, ending.matched_token_id)
                self._end(request, ending.status, seq.choice)

    def _expire(self) -> None:
        for request in self._deadlines.passed(self._now_s()):
            self._fail(request, _DEADLINE)

    def _now_s(self) -> float:
        return self._now_ns() / 1e9

    def _note_plan(self, plan: SchedulerOutputs) -> None:
        """Marks of what the scheduler decided."""
        for admission in plan.admissions:
            request = admission.seq.request
            if not request.admitted:
                request.admitted = True
                request.num_cached_tokens = admission.num_cached_tokens
                self._num_waiting -= 1
                self._timer.observe_admission()
                self._mark(request, "admit", cached_tokens=admission.num_cached_tokens)
        for preemption in plan.preemptions:
            seq, lost = preemption.seq, preemption.lost_tokens
            self._mark(seq.request, "submit", preempted=1, choice=seq.choice, lost_tokens=lost)
        for seq, meta in zip(plan.seqs, plan.batch, strict=True):
            if meta.start < seq.num_prompt:
                step, tokens = plan.step, len(meta.token_ids)
                self._mark(seq.request, "submit", step=step, start=meta.start, tokens=tokens)
        for request in plan.released:
            self._release(request)

    def _process_model_outputs(
        self, plan: SchedulerOutputs, output: SamplerOutput, device_s: float
    ) -> None:
        """Take in the outcome of a round: cache, tokens, endings, and what may be released."""
        self._result.step = plan.step
        decodes = plan.num_batched_tokens - plan.num_prefill_tokens
        self._timer.observe_round(plan.num_prefill_tokens, decodes, device_s)
        if output.prompt_logprobs:
            keep_prompt_logprobs(plan, output)
        if output.nan_rows:
            # What the runner scrubbed may be in any block: no content can be trusted any more.
            self.scheduler.clear_cache()
        else:
            self._register(plan)
        refused = dict.fromkeys(output.empty_rows, _NO_TOKEN) | dict.fromkeys(output.nan_rows, _NAN)
        for row, index in enumerate(plan.sampled):
            seq = plan.seqs[index]
            seq.inflight -= 1
            if seq.finished:
                continue
            if refused and row in refused:
                self._fail(seq.request, refused[row])
            else:
                self._accept(seq, output.tokens[row])
        for request in self._cache.collected(plan.step):
            self._release(request)

    def _register(self, plan: SchedulerOutputs) -> None:
        size = self.memory.block_size
        for seq, meta in zip(plan.seqs, plan.batch, strict=True):
            computed = meta.start + len(meta.token_ids)
            if computed >= (seq.num_registered + 1) * size and seq.block_table:
                replaced = self._blocks.register_computed(seq, computed)
                if replaced:
                    self._cache.release(seq.last_step, replaced, None, [])

    def _accept(self, seq: Sequence, token: SampledToken) -> None:
        seq.tokens.append(token.token_id)
        failure = advance(seq, token.token_id)
        if failure is not None:
            self._fail(seq.request, failure)
            return
        ending = ending_after(seq)
        if ending is None:
            self._emit(seq, token, None, None)
        else:
            self._emit(seq, token, ending.reason, ending.matched_token_id)
            self._end(seq.request, ending.status, seq.choice)

    def _emit(
        self, seq: Sequence, token: SampledToken | None, reason: str | None, matched: int | None
    ) -> None:
        if self._result.tell(seq, token, reason, matched):
            self._mark(seq.request, "collect", choice=seq.choice, first=1)
        if reason is not None:
            self._mark(seq.request, "collect", choice=seq.choice, end=1, tokens=seq.num_output)

    def _fail(self, request: Request, failure: Failure) -> None:
        self._result.failures.append(RequestFailure(request.key, *failure))
        self._end(request, SequenceStatus.FINISHED_FAILED)

    def _end(self, request: Request, status: SequenceStatus, choice: int | None = None) -> None:
        """End all choices that run, or one; the only place where a sequence ends."""
        released: list[Request] = []
        for seq in request.choices:
            if not seq.finished and choice in (None, seq.choice):
                request.open_choices -= 1
                self.scheduler.finish(seq, status, released)
                if request.open_choices == 0:
                    self._close_request(request)
        for ended in released:
            self._release(ended)

    def _close_request(self, request: Request) -> None:
        self.constraints.drop(request)
        self._num_open -= 1
        if not request.admitted:
            self._num_waiting -= 1

    def _release(self, request: Request) -> None:
        del self._requests[request.key]
        self._mark(request, "release")

    def _mark(self, request: Request, verb: str, **detail: int) -> None:
        self._result.marks.append(Mark(request.key, verb, self._now_ns(), detail))
