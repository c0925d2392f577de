"""What DeepSeek V4 keeps of a request: sizes, and which block an entry belongs to."""

from typing import Any

import pytest
import torch

from services.engine.compute.models.cache_tensors import block_bytes, layout_name
from services.engine.compute.models.v4_modules.memory import cache_tensors, state_bytes
from services.engine.compute.models.v4_modules.model import plan_v4
from services.engine.contract.deepseek_v4 import DeepseekV4Config
from services.engine.contract.runner import SequenceMetadata
from tests.doubles.tiny_v4 import tiny_config
from tests.doubles.v4_driver import V4Memory

FLASH: dict[str, Any] = {
    "num_hidden_layers": 43,
    "layer_types": None,
    "compress_ratios": [0, 0, *(4, 128) * 20, 4],
    "mlp_layer_types": None,
    "compress_rates": None,
    "head_dim": 512,
    "index_head_dim": 128,
    "sliding_window": 128,
}
"""What the memory of V4-Flash depends on: 2 window, 21 indexed and 20 dense layers."""


@pytest.fixture
def flash() -> DeepseekV4Config:
    return tiny_config(**FLASH)


def test_the_state_has_one_size_for_any_length(flash: DeepseekV4Config):
    window = 128 * 512 * 43
    indexed = 8 * 2 * (2 * 512 + 2 * 128) * 21
    dense = 128 * 2 * 512 * 20
    assert state_bytes(flash) == 4 * (window + indexed + dense)
    drafts = 8 * (512 * 43 + 2 * (2 * 512 + 2 * 128) * 21 + 2 * 512 * 20)
    assert state_bytes(flash, drafts=8) == 4 * (window + indexed + dense + drafts)


def test_the_history_grows_with_the_positions(flash: DeepseekV4Config):
    tensors = cache_tensors(flash)
    assert block_bytes(tensors, 256) == 4 * (64 * (512 + 128) * 21 + 2 * 512 * 20)
    # A block shorter than a window has room for the one entry that may end in it.
    assert block_bytes(tensors, 16) == 4 * (4 * (512 + 128) * 21 + 512 * 20)
    kinds = ("21xentry512per4", "20xentry512per128", "21xindex128per4")
    assert layout_name(tensors) == f"paged/{'+'.join(f'{kind}/float32' for kind in kinds)}"
    with pytest.raises(ValueError, match="block_size is 24, it must be a multiple or a divisor"):
        block_bytes(tensors, 24)


@pytest.mark.parametrize(("block_size", "blocks"), [(4, 8), (8, 4), (16, 2)])
def test_an_entry_is_in_the_block_of_its_last_position(block_size: int, blocks: int):
    table = tuple(range(10, 10 + blocks))
    rows = [SequenceMetadata(0, 0, (1,) * 32, None, table, sample=True, state_slot=1)]
    plan = plan_v4(tiny_config(), rows, torch.ones(32), block_size=block_size)
    for ratio, entries in plan.entries.items():
        per_block = max(1, block_size // ratio)
        found = [slot // per_block for slot in entries.slots.tolist()]
        assert found == [table[position // block_size] for position in range(ratio - 1, 32, ratio)]
        assert len(set(entries.slots.tolist())) == 32 // ratio


def test_a_copied_slot_is_whole_and_touches_no_other():
    memory = V4Memory(tiny_config(), num_blocks=4, block_size=16, num_slots=4)
    for layer in memory.views:
        for tensor in layer.states:
            tensor.add_(torch.arange(4.0).view(4, *(1,) * (tensor.dim() - 1)))
    memory.states.copy([(1, 2), (3, 1)])
    for layer in memory.views:
        assert len(layer.states) == 1 + (layer.main is not None) + (layer.index is not None)
        for tensor in layer.states:
            assert [set(part.flatten().tolist()) for part in tensor] == [{0}, {3}, {1}, {3}]
    assert bool((memory.states.slots.view(torch.float32)[1] == 3).all())  # no byte is outside
