"""A tiny model on disk, and a driver that runs sequences on a runner without a scheduler."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from services.engine.compute.model_runner import ModelRunner
from services.engine.contract.config import EngineConfig
from services.engine.contract.runner import SamplerOutput, SamplingRow, SequenceMetadata
from services.engine.contract.sampling_params import SamplingParams
from tests.doubles.tiny_model import TinyShape, write_tiny_model

DATA = Path(__file__).parents[2] / "data"
GREEDY = SamplingParams(temperature=0)


@pytest.fixture(scope="session")
def tiny_golden() -> dict:
    """Logits of transformers for the tiny models."""
    return json.loads((DATA / "tiny_llama_golden.json").read_text(encoding="utf-8"))["models"]


@pytest.fixture(scope="session")
def tiny_folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The tiny models of the golden data, by name."""
    root = tmp_path_factory.mktemp("tiny")
    untied = TinyShape(seed=1, tie_embeddings=False, llama3_rope=True)
    return {
        "tied": write_tiny_model(root / "tied"),
        "untied_llama3": write_tiny_model(root / "untied_llama3", untied),
    }


@dataclass
class Drive:
    """Runs rounds by hand; each sequence gets blocks of its own, not in order."""

    runner: ModelRunner
    block_size: int
    num_blocks: int = 400
    step: int = 0
    free: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.runner.allocate(self.num_blocks)
        last = self.num_blocks - 1
        self.free = list(range(last, 0, -2)) + list(range(last - 1, 0, -2))

    def table(self, length: int) -> tuple[int, ...]:
        """Blocks for that many positions."""
        return tuple(self.free.pop() for _ in range(-(-length // self.block_size)))

    def round(
        self, batch: Sequence[SequenceMetadata], rows: Sequence[SamplingRow], previous=None
    ) -> SamplerOutput:
        """One forward and its draw."""
        self.step += 1
        hidden = self.runner.execute_main_model(self.step, batch, previous)
        output = self.runner.execute_sample(self.step, hidden, rows)
        return output if isinstance(output, SamplerOutput) else output.wait()

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        counts: Sequence[int],
        *,
        params: Sequence[SamplingParams] | None = None,
        chunk: int = 10_000,
        tables: Sequence[tuple[int, ...]] | None = None,
        computed: Sequence[int] | None = None,
    ) -> list[list[int]]:
        """Tokens per prompt: prompts in chunks beside the others' decodes, one batch a round."""
        params = params or [GREEDY] * len(prompts)
        tables = tables or [self.table(len(p) + n) for p, n in zip(prompts, counts, strict=True)]
        starts = list(computed or [0] * len(prompts))
        outputs: list[list[int]] = [[] for _ in prompts]
        previous, rows_of = None, {}
        while any(len(out) < n for out, n in zip(outputs, counts, strict=True)):
            batch, rows, drawn = [], [], []
            for index, prompt in enumerate(prompts):
                if len(outputs[index]) >= counts[index]:
                    continue
                start, prev_row = starts[index], None
                if start < len(prompt):
                    tokens = tuple(prompt[start : start + chunk])
                else:
                    tokens, prev_row = (0,), rows_of[index]
                end = start + len(tokens)
                sample = end >= len(prompt)
                batch.append(
                    SequenceMetadata(index, start, tokens, prev_row, tables[index], sample)
                )
                starts[index] = end
                if sample:
                    own = params[index]
                    rows.append(SamplingRow(own, own.seed or 0, 0, end))
                    drawn.append(index)
            previous = self.round(batch, rows, previous)
            rows_of = {index: row for row, index in enumerate(drawn)}
            for index, token in zip(drawn, previous.tokens, strict=True):
                outputs[index].append(token.token_id)
        return outputs


@pytest.fixture
def drive() -> Callable[..., Drive]:
    """Makes a driver over a model; takes fields of EngineConfig."""

    def make(model: str | Path, *, num_blocks: int = 400, **fields) -> Drive:
        config = EngineConfig(model=str(model), threads=1, **fields)
        return Drive(ModelRunner(config), config.block_size, num_blocks)

    return make
