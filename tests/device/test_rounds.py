"""Rounds on a CUDA device: no wait, the same tokens with and without captured rounds."""

from dataclasses import replace

import pytest
import torch

from kernels import dispatch
from services.engine.compute.device.cuda import CudaDevice
from services.engine.compute.model_runner import ModelRunner
from services.engine.contract.config import EngineConfig
from services.engine.contract.runner import PendingOutput, SamplingRow, SequenceMetadata
from services.engine.contract.sampling_params import SamplingParams
from tests.doubles.tiny_model import TinyShape, write_tiny_model

pytestmark = pytest.mark.gpu
ROW = SamplingRow(SamplingParams(top_p=0.9, top_k=9, logprobs=True, top_logprobs=2), 7, 0, 9)
ROUNDS = 12


@pytest.fixture(scope="module", autouse=True)
def _device():
    assert torch.cuda.is_available(), "no CUDA device: make gpu needs one"


class Launched(CudaDevice):
    """The same device without graphs."""

    captures = False


def tokens(folder, device: CudaDevice) -> list[list[int]]:
    """Three sequences, decoded; synchronising calls of torch raise."""
    config = EngineConfig(model=str(folder), dtype="float32", block_size=16, max_num_seqs=4)
    runner = ModelRunner(config, device=device)
    runner.allocate(32)
    tables = [tuple(range(1 + 8 * i, 9 + 8 * i)) for i in range(3)]
    prompts = [(5, 6, 7), tuple(range(40, 75)), (200,)]
    batch = [SequenceMetadata(i, 0, prompts[i], None, tables[i], True) for i in range(3)]
    pending: list[PendingOutput] = []
    torch.cuda.set_sync_debug_mode("error")
    try:
        for step in range(ROUNDS):
            previous = pending[-1] if pending else None
            hidden = runner.execute_main_model(step, batch, previous)
            output = runner.execute_sample(step, hidden, [replace_position(ROW, step)] * 3)
            pending.append(output)
            batch = [
                SequenceMetadata(i, len(prompts[i]) + step, (0,), i, tables[i], True)
                for i in range(3)
            ]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    drawn = [[token.token_id for token in output.wait().tokens] for output in pending]
    runner.close()
    return drawn


def replace_position(row: SamplingRow, position: int) -> SamplingRow:
    return SamplingRow(row.params, row.seed, row.choice, position)


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_captured_rounds_draw_what_launched_ones_draw(kind, tmp_path):
    assert dispatch.load("triton").ragged is not None
    folder = write_tiny_model(tmp_path / kind, replace(TinyShape(), kind=kind))
    assert tokens(folder, CudaDevice()) == tokens(folder, Launched())
