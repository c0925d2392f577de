"""`Worker`: runs rounds on the device, one after the other, while the host does other work.

The worker's one thread plays the part of a device stream: copies, forward and sampling of round n
run on it in the order in which they were submitted, so forward n always sees the tokens of n-1.
"""

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import NamedTuple, TypeVar

from services.engine.contract.runner import (
    ExpertPlacement,
    PendingOutput,
    Runner,
    RunnerInfo,
    SamplerOutput,
    SamplingRow,
)
from services.engine.core.sampling_rows import sampling_row
from services.engine.scheduling.scheduler_outputs import SchedulerOutputs

R = TypeVar("R")
_Forward = Future[tuple[object, float]]
"""Hidden states of the sampled rows, and the seconds that the forward took."""


class _BegunRound(NamedTuple):
    """A round whose forward is submitted and whose sampling is not."""

    plan: SchedulerOutputs
    forward: _Forward


class _LaunchedRound(NamedTuple):
    """A round whose forward and sampling are submitted."""

    plan: SchedulerOutputs
    forward: _Forward
    sample: "Future[tuple[SamplerOutput | PendingOutput, float]]"


class CollectedRound(NamedTuple):
    """The result of a round."""

    plan: SchedulerOutputs
    output: SamplerOutput
    device_s: float
    """Seconds of its forward and its sampling."""


class Worker:
    """Owns the runner and its thread; the constructor loads the model.

    A round takes three calls: `launch`, `collect` (the round before it), `sample`.
    """

    def __init__(
        self,
        make_runner: Callable[[], Runner],
        on_forward_end: Callable[[object], None] | None = None,
    ) -> None:
        """Args:
        make_runner: called on the worker's thread.
        on_forward_end: called on the worker's thread whenever a forward has ended.
        """
        self._stream = ThreadPoolExecutor(1, thread_name_prefix="device-stream")
        self._on_forward_end = on_forward_end
        self._launched: _LaunchedRound | None = None
        self._begun: _BegunRound | None = None
        try:
            self._runner = self._stream.submit(make_runner).result()
        except BaseException:
            self._stream.shutdown()
            raise

    def describe(self) -> RunnerInfo:
        """See `Runner.describe`."""
        return self._runner.describe()

    def profile_kv_bytes(self, max_num_batched_tokens: int, max_num_seqs: int) -> int:
        """See `Runner.profile_kv_bytes`."""
        profile = self._runner.profile_kv_bytes
        return self._stream.submit(profile, max_num_batched_tokens, max_num_seqs).result()

    def allocate(self, num_blocks: int, num_states: int = 0) -> None:
        """See `Runner.allocate`."""
        self._stream.submit(self._runner.allocate, num_blocks, num_states).result()

    def prepare_placement(self, placement: ExpertPlacement) -> "Future[bool]":
        """See `Runner.prepare_placement`; runs after everything submitted before."""
        return self._submit(lambda: self._runner.prepare_placement(placement))

    def apply_placement(self, version: int) -> "Future[None]":
        """See `Runner.apply_placement`; rounds launched later use the new placement."""
        return self._submit(lambda: self._runner.apply_placement(version))

    def expert_loads(self) -> "Future[tuple[tuple[int, ...], ...] | None]":
        """See `Runner.expert_loads`."""
        return self._submit(self._runner.expert_loads)

    def check(self) -> None:
        """See `Runner.check`; runs on the caller's thread and does not wait for rounds."""
        self._runner.check()

    @property
    def in_flight(self) -> bool:
        """Whether a round was launched whose result is not collected."""
        return self._launched is not None or self._begun is not None

    @property
    def interrupted(self) -> bool:
        """Whether an error or an interrupt fell between `launch` and `sample` of a round."""
        return self._begun is not None

    @property
    def forward_done(self) -> bool:
        """Whether the forward of the last launched round has ended, or none is in flight."""
        return self._launched is None or self._launched.forward.done()

    def launch(self, plan: SchedulerOutputs) -> None:
        """Submit the forward of a round."""
        forward = self._stream.submit(self._execute_main_model, plan, self._launched)
        # Set before anything that can wait: an interrupt of a wait must not lose the round.
        self._begun = _BegunRound(plan, forward)
        if self._on_forward_end is not None:
            forward.add_done_callback(self._on_forward_end)

    def collect(self) -> CollectedRound | None:
        """Wait for the result of the round whose sampling is submitted; None if there is none.

        An interrupt of the wait loses nothing: the next call waits again.
        """
        launched = self._launched
        if launched is None:
            return None
        begun, sample_s = launched.sample.result()
        _, forward_s = launched.forward.result()
        output, waited_s = self._arrived(begun)
        self._launched = None
        return CollectedRound(launched.plan, output, forward_s + sample_s + waited_s)

    def sample(self) -> None:
        """Submit the sampling of the launched round; the round before it must be accounted for.

        Raises:
            RuntimeError: no round is launched, or a sequence does not have the length that the
                plan assumed.
        """
        if self._begun is None:
            raise RuntimeError("sample: no round is launched")
        plan, forward = self._begun
        rows = self._correct_seqlens_qk(plan)
        sample = self._stream.submit(self._execute_sample, plan, forward, rows)
        self._launched, self._begun = _LaunchedRound(plan, forward, sample), None

    def close(self) -> None:
        """Drop the rounds that have not started and end the thread and the runner; idempotent."""
        self._launched = self._begun = None
        self._stream.shutdown(cancel_futures=True)
        self._runner.close()

    def _arrived(self, output: SamplerOutput | PendingOutput) -> tuple[SamplerOutput, float]:
        """The output of a round on the host, and the seconds that this thread waited for it.

        Meanwhile the worker's thread launches the next forward.
        """
        if isinstance(output, SamplerOutput):
            return output, 0.0
        started = time.perf_counter()
        arrived = output.wait()
        if arrived.nan_rows:
            # Before any block of the round is used again: rounds that are planned from here on
            # are launched behind it.
            spoilt = self._stream.submit(self._runner.scrub).result()
            arrived = replace(arrived, nan_blocks=spoilt)
        return arrived, time.perf_counter() - started

    def _submit(self, call: Callable[[], R]) -> "Future[R]":
        """Run a call between rounds. Its end is reported like a forward's: the loop can go on."""
        future = self._stream.submit(call)
        if self._on_forward_end is not None:
            future.add_done_callback(self._on_forward_end)
        return future

    @staticmethod
    def _correct_seqlens_qk(plan: SchedulerOutputs) -> tuple[SamplingRow, ...]:
        """The sampling rows of round n, made after the result of n-1, which the plan assumed.

        A sequence that ended in n-1 keeps its row, because the forward has it already; its token is
        discarded. All other sequences must have exactly the length that the plan assumed.
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
        self, plan: SchedulerOutputs, previous: _LaunchedRound | None
    ) -> tuple[object, float]:
        started = time.perf_counter()
        sampled = None if previous is None else previous.sample.result()[0]
        if plan.copies:
            self._runner.copy_blocks(plan.copies)
        states = plan.states
        if states.clears:
            self._runner.clear_states(states.clears)
        if states.restores:
            self._runner.copy_states(states.restores)
        hidden = self._runner.execute_main_model(plan.step, plan.batch, sampled)
        if states.saves:
            self._runner.copy_states(states.saves)
        return hidden, time.perf_counter() - started

    def _execute_sample(
        self, plan: SchedulerOutputs, forward: _Forward, rows: tuple[SamplingRow, ...]
    ) -> tuple[SamplerOutput | PendingOutput, float]:
        started = time.perf_counter()
        output = self._runner.execute_sample(plan.step, forward.result()[0], rows)
        return output, time.perf_counter() - started
