"""A `ModelRunner` as it serves on a GPU, on a device that is not there."""

from pathlib import Path
from typing import Any

import torch

from services.engine.compute.device.rehearsal import RehearsalDevice
from services.engine.compute.model_runner import ModelRunner
from services.engine.contract.config import EngineConfig
from services.engine.contract.runner import PendingOutput, SamplerOutput, SamplingRow
from services.engine.contract.sampling_params import SamplingParams
from tests.doubles.fake_model import fake_source, rehearsed_batch

GREEDY = SamplingRow(SamplingParams(temperature=0), 0, 0, 9)


class Rehearsal:
    """See the module's docstring; models are the tiny ones, changed as wanted."""

    def __init__(
        self, folder: Path, architecture: str, *, max_num_seqs: int = 4, **changes: Any
    ) -> None:
        self.device = RehearsalDevice()
        config = EngineConfig(
            model=architecture,
            dtype="bfloat16",
            block_size=16,
            max_num_seqs=max_num_seqs,
            threads=torch.get_num_threads(),
        )
        with self.device.loading():
            source = fake_source(folder, architecture, **changes)
            self.runner = ModelRunner(config, source, device=self.device)
        with self.device.running():
            self.runner.allocate(64)
        self.device.clear()

    def round(
        self,
        *counts: int,
        row: SamplingRow = GREEDY,
        scored: bool = False,
        previous: SamplerOutput | PendingOutput | None = None,
    ) -> SamplerOutput | PendingOutput:
        """One round; the result is not awaited."""
        batch = rehearsed_batch(*counts, scored=scored)
        with self.device.running():
            hidden = self.runner.execute_main_model(1, batch, previous)
            return self.runner.execute_sample(1, hidden, [row] * len(batch))
