"""Runs rounds on the device in the order of a stream, and overlaps the host's work with them.

The one thread of a worker plays the stream: copies, forward and sampling of round n run on it in
the order in which they were handed over, so round n's forward always sees round n-1's tokens.
"""

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from services.engine.contract.runner import (
    ExpertPlacement,
    Runner,
    RunnerInfo,
    SamplerOutput,
    SamplingRow,
)
from services.engine.core.endings import sampling_row
from services.engine.scheduling.scheduler_outputs import SchedulerOutputs

T = TypeVar("T")
R = TypeVar("R")
PostProcess = Callable[[SchedulerOutputs, SamplerOutput, float], T]
"""Takes a round's plan, its tokens and the seconds that the device spent on it."""


@dataclass(frozen=True, slots=True)
class LaunchedRound:
    """A round on the device."""

    plan: SchedulerOutputs
    forward: "Future[tuple[object, float]]"
    """What its sampling needs, and the seconds it took."""
    sample: "Future[tuple[SamplerOutput, float]]"


class Worker:
    """Owns the runner and the thread that it lives on; loads the model when constructed."""

    def __init__(
        self,
        make_runner: Callable[[], Runner],
        on_forward_end: Callable[[object], None] | None = None,
    ) -> None:
        self._stream = ThreadPoolExecutor(1, thread_name_prefix="device-stream")
        self._on_forward_end = on_forward_end
        self._launched: LaunchedRound | None = None
        self._begun: tuple[SchedulerOutputs, Future[tuple[object, float]]] | None = None
        try:
            self._runner = self._stream.submit(make_runner).result()
        except BaseException:
            self._stream.shutdown()
            raise

    def describe(self) -> RunnerInfo:
        """Facts fixed at load."""
        return self._runner.describe()

    def profile_kv_bytes(self, max_num_batched_tokens: int, max_num_seqs: int) -> int:
        """See Runner."""
        profile = self._runner.profile_kv_bytes
        return self._stream.submit(profile, max_num_batched_tokens, max_num_seqs).result()

    def allocate(self, num_blocks: int) -> None:
        """See Runner."""
        self._stream.submit(self._runner.allocate, num_blocks).result()

    def prepare_placement(self, placement: ExpertPlacement) -> "Future[bool]":
        """See Runner; runs after what was handed over before."""
        return self._submit(lambda: self._runner.prepare_placement(placement))

    def apply_placement(self, version: int) -> "Future[None]":
        """See Runner; rounds handed over later use the new map."""
        return self._submit(lambda: self._runner.apply_placement(version))

    def expert_loads(self) -> "Future[tuple[tuple[int, ...], ...] | None]":
        """See Runner."""
        return self._submit(self._runner.expert_loads)

    def check(self) -> None:
        """See Runner; on the caller's thread, whatever the stream does."""
        self._runner.check()

    def _submit(self, call: Callable[[], R]) -> "Future[R]":
        """Between rounds; its end counts as an end of a forward: the loop has something to do."""
        future = self._stream.submit(call)
        if self._on_forward_end is not None:
            future.add_done_callback(self._on_forward_end)
        return future

    @property
    def in_flight(self) -> bool:
        """Whether a round was launched whose outcome is not collected."""
        return self._launched is not None or self._begun is not None

    @property
    def interrupted(self) -> bool:
        """Whether an error or an interrupt left a round whose sampling is not handed over: only
        `flush` goes on from there."""
        return self._begun is not None

    @property
    def forward_done(self) -> bool:
        """Whether the forward of the last launched round has ended, or none is in flight."""
        return self._launched is None or self._launched.forward.done()

    def execute_model_step(self, plan: SchedulerOutputs, post_process: PostProcess[T]) -> T | None:
        """One round; returns what post-processing the round before it gave, None without one.

        1. forward n is launched
        2. while it runs, round n-1 is post-processed on this thread
        3. rows n are corrected by what that changed, and sampling n is queued behind the forward
        """
        forward = self._stream.submit(self._execute_main_model, plan, self._launched)
        self._begun = plan, forward  # before any wait: an interrupt of it must not lose the round
        if self._on_forward_end is not None:
            forward.add_done_callback(self._on_forward_end)
        return self._hand_over_sample(plan, forward, post_process)

    def flush(self, post_process: PostProcess[T]) -> T | None:
        """Wait for the round in flight, if there is one, and post-process it.

        After an interrupt there may be two; both are post-processed.
        """
        if self._begun is not None:
            self._hand_over_sample(*self._begun, post_process)
        return self._collect(post_process)

    def close(self) -> None:
        """End the thread after what it runs; idempotent."""
        self._launched = self._begun = None
        self._stream.shutdown(cancel_futures=True)
        self._runner.close()

    def _hand_over_sample(
        self,
        plan: SchedulerOutputs,
        forward: "Future[tuple[object, float]]",
        post_process: PostProcess[T],
    ) -> T | None:
        result = self._collect(post_process)
        rows = self._correct_seqlens_qk(plan)
        sample = self._stream.submit(self._execute_sample, plan, forward, rows)
        self._launched, self._begun = LaunchedRound(plan, forward, sample), None
        return result

    def _collect(self, post_process: PostProcess[T]) -> T | None:
        """An interrupted wait forgets nothing; what was post-processed is never so again."""
        launched = self._launched
        if launched is None:
            return None
        output, sample_s = launched.sample.result()
        _, forward_s = launched.forward.result()
        self._launched = None
        return post_process(launched.plan, output, forward_s + sample_s)

    @staticmethod
    def _correct_seqlens_qk(plan: SchedulerOutputs) -> tuple[SamplingRow, ...]:
        """The rows of round n after the outcome of n-1, which its plan could only assume.

        A sequence that ended in n-1 keeps its row, since the forward already has it: it draws a
        token that nobody takes. All others must have exactly the length that the plan assumed.
        """
        rows = []
        for index in plan.sampled:
            seq, meta = plan.seqs[index], plan.batch[index]
            row = sampling_row(seq)
            if not seq.finished and row.position != meta.start + len(meta.token_ids):
                raise RuntimeError(
                    f"round {plan.step}: sequence {seq.seq_id} has {row.position} tokens, its "
                    f"plan assumed {meta.seqlen_k}"
                )
            rows.append(row)
        return tuple(rows)

    def _execute_main_model(
        self, plan: SchedulerOutputs, previous: LaunchedRound | None
    ) -> tuple[object, float]:
        started = time.perf_counter()
        drawn = None if previous is None else previous.sample.result()[0]
        if plan.copies:
            self._runner.copy_blocks(plan.copies)
        hidden = self._runner.execute_main_model(plan.step, plan.batch, drawn)
        return hidden, time.perf_counter() - started

    def _execute_sample(
        self,
        plan: SchedulerOutputs,
        forward: "Future[tuple[object, float]]",
        rows: tuple[SamplingRow, ...],
    ) -> tuple[SamplerOutput, float]:
        started = time.perf_counter()
        output = self._runner.execute_sample(plan.step, forward.result()[0], rows)
        return output, time.perf_counter() - started
