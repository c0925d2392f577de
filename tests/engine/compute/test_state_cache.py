"""State slots on the device: whole slots are cleared and copied, the others stay."""

import torch

from services.engine.compute.state_cache import StateCache
from services.engine.contract.runner import StateBlock


def test_slots_are_copied_and_cleared_whole():
    cache = StateCache(StateBlock(nbytes=24, boundary=4), 4, torch.device("cpu"))
    assert not cache.slots.any()
    floats = cache.slots.view(torch.float32)
    floats[1], floats[2] = 1.5, torch.nan
    cache.copy([(1, 3)])
    cache.clear([2])
    assert floats.tolist() == [[0.0] * 6, [1.5] * 6, [0.0] * 6, [1.5] * 6]
    cache.clear([1, 3])
    assert not cache.slots.any()
