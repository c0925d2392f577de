"""Sizes of the cache, and blocks that are held back while a launched round may write to them."""

from dataclasses import replace

import pytest

from services.common.config.settings import ConfigError
from services.engine.compute.simulated_runner import SimulatedModel, SimulatedRunner
from services.engine.contract.config import EngineConfig
from services.engine.contract.runner import StateBlock
from services.engine.contract.sampling_params import SamplingParams
from services.engine.scheduling.block_manager import BlockManager
from services.engine.scheduling.kv_cache import CacheEngine, KVCacheManager, kv_budget
from services.engine.scheduling.sequence import Request, Sequence

INFO = replace(
    SimulatedRunner(32, SimulatedModel(max_model_len=1024)).describe(), kv_bytes_per_block=1000
)


def test_budgets_are_fractions_or_sizes():
    assert kv_budget("0.5", 1000) == 500
    assert kv_budget("1MiB", 2**21) == 2**20
    assert kv_budget("1.5GiB", 2**31) == 3 * 2**29


@pytest.mark.parametrize("text", ["", "-1", "half", "2GB", "0.5GiBs", "2GiB", "1.5", "9000TiB"])
def test_other_budgets_are_refused_by_their_key(text):
    with pytest.raises(ConfigError, match=r"^kv_memory"):
        kv_budget(text, 2**30)


def test_memory_that_holds_no_request_of_full_length_is_refused():
    config = EngineConfig(kv_memory="1.0")
    assert KVCacheManager.plan(config, INFO, 33_000).num_blocks == 32
    with pytest.raises(ConfigError, match="max_model_len to at most 992"):
        KVCacheManager.plan(config, INFO, 32_999)
    assert KVCacheManager.plan(replace(config, max_model_len=992), INFO, 32_999).num_blocks == 31


def test_memory_that_holds_no_block_at_all_says_what_would_do():
    config = EngineConfig(kv_memory="1KiB")
    with pytest.raises(ConfigError, match=r"1KiB is 1024 bytes, too few .* takes 33KiB") as caught:
        KVCacheManager.plan(config, INFO, 2**20)
    assert "at most 0" not in str(caught.value)
    assert KVCacheManager.plan(replace(config, kv_memory="33KiB"), INFO, 2**20).num_blocks == 32


def test_a_fixed_number_of_blocks_is_taken_at_its_word():
    plan = KVCacheManager.plan(EngineConfig(num_blocks=3), INFO, 0)
    assert (plan.num_blocks, plan.num_positions, plan.kv_bytes) == (3, 96, 4000)


def test_blocks_come_back_with_the_last_round_that_may_write_to_them():
    manager = BlockManager(4, 4)
    cache = CacheEngine(manager)
    blocks = tuple(manager.blocks.take() for _ in range(4))
    assert not cache.release(1, blocks[:2])
    assert not cache.release(2, blocks[2:3])
    assert (manager.num_available, cache.num_pending) == (0, 3)
    cache.collected(1)
    assert (manager.num_available, cache.num_pending) == (2, 1)
    assert not cache.release(1, blocks[3:])
    assert manager.num_available == 3
    cache.collected(2)
    assert (manager.num_available, cache.num_pending) == (4, 0)


def test_a_slot_of_state_comes_back_with_the_last_round_that_uses_it():
    manager = BlockManager(4, 4, state=StateBlock(8, 4), num_states=2)
    cache = CacheEngine(manager)
    request = Request("r", (1, 2, 3), SamplingParams(), 0, b"", frozenset(), max_length=9)
    seq = Sequence(1, request, 0)
    assert manager.try_allocate_seq(seq) is not None
    seq.planned(1, 3, None)
    assert cache.take_state_work(1, [seq]).clears == (seq.state_slot,)
    cache.retire(seq)
    assert (manager.states.slots.num_held, cache.num_pending_states) == (1, 1)
    cache.collected(1)
    assert (manager.states.slots.num_held, cache.num_pending_states) == (0, 0)


def test_a_copied_block_is_held_until_its_round_is_collected():
    manager = BlockManager(4, 4)
    cache = CacheEngine(manager)
    source, target = manager.blocks.take(), manager.blocks.take()
    manager.blocks.share(source)
    cache.copy(source, target)
    assert cache.take_copies(2) == ((source, target),)
    assert cache.take_copies(3) == ()
    manager.drop([source])
    cache.collected(1)
    assert manager.num_available == 2
    cache.collected(2)
    assert manager.num_available == 3
