"""Rounds of our runner, without scheduler: forward, head and greedy draw."""

from collections.abc import Callable

from services.engine.config import EngineConfig
from services.engine.loader import load_model
from services.engine.model_runner import ModelRunner
from services.engine.runner import SamplerOutput, SamplingRow, SequenceMetadata
from services.engine.sampling_params import SamplingParams

GREEDY = SamplingParams(temperature=0)
BLOCK = 32


class Ours:
    """One loaded runner."""

    def __init__(self, dtype: str, threads: int, *, deterministic: bool) -> None:
        self.source = load_model("")
        config = EngineConfig(
            dtype=dtype, threads=threads, block_size=BLOCK, deterministic=deterministic
        )
        self._runner = ModelRunner(config, self.source)
        self._runner.allocate(1200)

    def prefill(self, length: int) -> Callable[[], int]:
        """One prompt and its first token."""

        def work() -> int:
            self._round([(0, tuple(range(5, 5 + length)))], length, None)
            return length

        return work

    def decode(self, batch: int, length: int, steps: int) -> Callable[[], int]:
        """Steps of a batch after its prompts."""
        for index in range(batch):
            prompt = tuple(range(5 + index, 5 + index + length))
            self._round([(0, prompt)], length + steps, None, offset=index)

        def work() -> int:
            previous: SamplerOutput | None = None
            for step in range(steps):
                parts = [(length + step, (7,))] * batch
                previous = self._round(parts, length + steps, previous)
            return batch * steps

        return work

    def _round(
        self,
        parts: list[tuple[int, tuple[int, ...]]],
        longest: int,
        previous: SamplerOutput | None,
        offset: int = 0,
    ) -> SamplerOutput:
        blocks = -(-longest // BLOCK)
        batch, rows = [], []
        for index, (start, tokens) in enumerate(parts, start=offset):
            table = tuple(range(1 + index * blocks, 1 + (index + 1) * blocks))
            row = index - offset if previous else None
            batch.append(SequenceMetadata(index, start, tokens, row, table, sample=True))
            rows.append(SamplingRow(GREEDY, 0, 0, start + len(tokens)))
        hidden = self._runner.execute_main_model(0, batch, previous)
        return self._runner.execute_sample(0, hidden, rows)
