"""Models whose layers all slide give the same logits when blocks before the window are gone."""

import pytest
import torch

from services.engine.contract.runner import SequenceMetadata
from tests.doubles.tiny_model import TinyShape, write_tiny_model

WINDOW, BLOCK = 9, 4
PROMPT = [(37 * i * i + 11 * i) % 251 for i in range(43)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    shape = TinyShape(kind="mistral", sliding_window=WINDOW)
    return write_tiny_model(tmp_path_factory.mktemp("sliding") / "m", shape)


@pytest.mark.parametrize(
    "fields", [{}, {"kernels": "torch"}, {"kernels": "torch", "deterministic": True}]
)
def test_blocks_before_the_window_are_not_read(fields, folder, drive):
    run = drive(folder, block_size=BLOCK, **fields)
    assert run.runner.describe().window == WINDOW
    table = run.table(len(PROMPT))

    def logits(seq_id, start, end, released=0) -> torch.Tensor:
        blocks = (0,) * released + table[released:]
        part = tuple(PROMPT[start:end])
        meta = SequenceMetadata(seq_id, start, part, None, blocks, sample=True)
        return run.runner.execute_main_model(seq_id, [meta], None).logits.clone()

    logits(1, 0, 37)
    first = (37 - WINDOW + 1) // BLOCK
    for end in (38, 41):  # a decode, and a chunk
        whole = logits(2 * end, 37, end)
        assert torch.equal(logits(2 * end + 1, 37, end, released=first), whole)
    assert not torch.equal(logits(99, 37, 41, released=first + 1), whole), "a block too many"


def test_a_model_with_a_layer_that_attends_to_all_keeps_its_blocks(tmp_path, drive):
    shape = TinyShape(kind="qwen2", sliding_window=WINDOW)
    run = drive(write_tiny_model(tmp_path / "m", shape), block_size=BLOCK)
    assert run.runner.describe().window == 0
    assert run.runner.describe().state is None
