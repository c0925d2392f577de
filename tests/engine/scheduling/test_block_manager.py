"""Blocks: all or nothing, reuse by content, copies instead of shared writes, leaves first."""

import pytest

from services.common.block_hash import BlockHash, hash_blocks, root
from services.engine.contract.messages import ClearedBlocks, RemovedBlocks, StoredBlocks
from services.engine.contract.sampling_params import SamplingParams
from services.engine.scheduling.block_manager import BlockManager
from services.engine.scheduling.sequence import Request, Sequence

ROOT = root(b"namespace")


def make_seq(tokens, seq_id=0, salt=b"", **params) -> Sequence:
    request = Request(
        key=str(seq_id),
        prompt=tuple(tokens),
        params=SamplingParams(**params),
        arrival=seq_id,
        root_hash=root(b"namespace", salt),
        end_ids=frozenset(),
        max_length=1000,
    )
    return Sequence(seq_id, request, 0)


def computed(manager: BlockManager, tokens, **kwargs) -> Sequence:
    """A sequence whose blocks are written and reusable."""
    seq = make_seq(tokens, **kwargs)
    assert manager.try_allocate_seq(seq) is not None
    assert manager.register_computed(seq, len(tokens)) == ()
    return seq


def drop(manager: BlockManager, seq: Sequence) -> None:
    manager.drop(reversed(seq.remove_blocks()))


@pytest.fixture
def manager() -> BlockManager:
    return BlockManager(8, 4)


def test_blocks_are_handed_out_all_or_nothing_and_never_block_zero(manager):
    first, second = make_seq(range(20)), make_seq(range(100, 116))
    assert manager.try_allocate_seq(first).num_computed == 0
    assert len(first.block_table) == 5
    assert 0 not in first.block_table
    assert manager.try_allocate_seq(second) is None
    assert second.block_table == ()
    assert manager.num_available == 3
    manager.check_integrity([first.block_table])


def test_headroom_stays_available(manager):
    assert manager.try_allocate_seq(make_seq(range(28)), headroom=2) is None
    assert manager.try_allocate_seq(make_seq(range(28)), headroom=1) is not None


def test_a_known_prefix_is_shared_and_the_rest_is_new(manager):
    first = computed(manager, range(12))
    second = make_seq([*range(8), 50, 51, 52], seq_id=1)
    assert manager.try_allocate_seq(second) == (8, None)
    assert second.block_table[:2] == first.block_table[:2]
    assert second.block_table[2] != first.block_table[2]
    manager.check_integrity([first.block_table, second.block_table])


def test_content_that_is_not_computed_is_not_reused(manager):
    manager.try_allocate_seq(make_seq(range(12)))
    assert manager.try_allocate_seq(make_seq(range(12), seq_id=1)).num_computed == 0


def test_a_fully_cached_prompt_computes_its_last_token_in_a_copy(manager):
    first = computed(manager, range(8))
    second = make_seq(range(8), seq_id=1)
    allocation = manager.try_allocate_seq(second)
    assert allocation.num_computed == 7
    assert allocation.copy == (first.block_table[1], second.block_table[1])
    assert second.block_table[0] == first.block_table[0]
    # The copy's source has a reference of its own until the copy is done.
    pinned = (first.block_table[1],)
    manager.check_integrity([first.block_table, second.block_table, pinned])


def test_a_fully_cached_prompt_of_the_whole_memory_still_fits(manager):
    drop(manager, computed(manager, range(32)))
    seq = make_seq(range(32), seq_id=1)
    assert manager.try_allocate_seq(seq) == (28, None)
    manager.check_integrity([seq.block_table])


def test_equal_content_computed_twice_is_kept_once(manager):
    first, second = make_seq(range(8)), make_seq(range(8), seq_id=1)
    manager.try_allocate_seq(first)
    manager.try_allocate_seq(second)
    own = second.block_table
    manager.register_computed(first, 8)
    assert manager.register_computed(second, 8) == own
    assert second.block_table == first.block_table
    manager.drop(own)
    manager.check_integrity([first.block_table, second.block_table])


def test_leaves_are_evicted_first(manager):
    drop(manager, computed(manager, range(16)))
    manager.drain_events()
    taken = make_seq(range(100, 124), seq_id=1)  # 6 of 8 blocks: two must go
    manager.try_allocate_seq(taken)
    hashes = hash_blocks(ROOT, list(range(16)), 4)
    assert manager.drain_events() == [RemovedBlocks(hashes=[hashes[3], hashes[2]])]
    manager.check_integrity([taken.block_table])
    drop(manager, taken)
    assert manager.try_allocate_seq(make_seq([*range(16), 1], seq_id=2)).num_computed == 8


def test_the_least_recently_used_chain_goes_first(manager):
    old, new = computed(manager, range(8)), computed(manager, range(50, 58), seq_id=1)
    drop(manager, new)
    drop(manager, old)
    again = make_seq([*range(50, 58), 1], seq_id=2)
    manager.try_allocate_seq(again)
    drop(manager, again)
    manager.try_allocate_seq(make_seq(range(100, 124), seq_id=3))
    assert manager.blocks.find(hash_blocks(ROOT, list(range(50, 58)), 4)[0]) is not None
    assert manager.blocks.find(hash_blocks(ROOT, list(range(8)), 4)[0]) is None


@pytest.mark.parametrize("params", [{"cache_bypass": True}, {"prompt_logprobs": True}])
def test_requests_that_must_compute_everything_do(manager, params):
    computed(manager, range(12))
    assert manager.try_allocate_seq(make_seq(range(12), seq_id=1, **params)).num_computed == 0


def test_a_bypassing_request_leaves_nothing_behind(manager):
    computed(manager, range(12), cache_bypass=True)
    assert manager.drain_events() == []
    assert manager.try_allocate_seq(make_seq(range(12), seq_id=1)).num_computed == 0


def test_salts_separate_caches(manager):
    drop(manager, computed(manager, range(8)))
    assert manager.try_allocate_seq(make_seq([*range(8), 1], 1, salt=b"x")).num_computed == 0


def test_a_fork_shares_the_prompt_but_not_the_block_it_writes(manager):
    parent, child = make_seq(range(10)), make_seq(range(10), seq_id=1)
    manager.try_allocate_seq(parent)
    allocation = manager.try_fork_seq(child, parent)
    assert allocation == (9, (parent.block_table[2], child.block_table[2]))
    assert child.block_table[:2] == parent.block_table[:2]
    manager.check_integrity([parent.block_table, child.block_table, (parent.block_table[2],)])


def test_a_fork_at_a_block_border_needs_no_copy(manager):
    parent, child = make_seq(range(9)), make_seq(range(9), seq_id=1)
    manager.try_allocate_seq(parent)
    assert manager.try_fork_seq(child, parent) == (8, None)


def test_events_tell_chains_and_the_snapshot_repeats_them(manager):
    seq = computed(manager, range(12))
    hashes = hash_blocks(ROOT, list(range(12)), 4)
    assert manager.drain_events() == [StoredBlocks(hashes=hashes, parent=None)]
    branch = computed(manager, [*range(4), 9, 9, 9, 9], seq_id=1)
    (stored,) = manager.drain_events()
    assert stored.parent == hashes[0]
    assert manager.snapshot() == [StoredBlocks(hashes=hashes, parent=None), stored]
    manager.clear([seq, branch])
    assert manager.drain_events() == [ClearedBlocks()]
    assert manager.snapshot() == []
    manager.check_integrity([seq.block_table, branch.block_table])


def test_a_block_is_reusable_once_it_is_full(manager):
    seq = make_seq(range(7))
    manager.try_allocate_seq(seq)
    manager.register_computed(seq, 7)
    assert manager.snapshot() == [StoredBlocks(hash_blocks(ROOT, list(range(4)), 4), None)]


def test_a_clear_makes_cached_blocks_free(manager):
    kept = computed(manager, range(8))
    drop(manager, computed(manager, range(50, 58), seq_id=1))
    manager.clear([kept])
    assert manager.num_available == 6
    manager.check_integrity([kept.block_table])


def test_growth_ends_with_the_memory(manager):
    seq = make_seq(range(4))
    manager.try_allocate_seq(seq)
    assert [manager.grow(seq) for _ in range(8)] == [True] * 7 + [False]
    assert seq.capacity == 32


@pytest.mark.parametrize("spoil", ["refs", "hash", "free"])
def test_the_integrity_check_sees_a_spoilt_record(manager, spoil):
    seq = computed(manager, range(8))
    blocks = manager.blocks
    if spoil == "refs":
        blocks.share(seq.block_table[0])
    elif spoil == "hash":
        blocks._by_hash[BlockHash(b"other")] = seq.block_table[0]
    else:
        blocks._free.append(seq.block_table[0])
    with pytest.raises(AssertionError):
        manager.check_integrity([seq.block_table])


def test_a_block_is_given_back_once(manager):
    seq = make_seq(range(4))
    manager.try_allocate_seq(seq)
    manager.drop(seq.block_table)
    with pytest.raises(ValueError, match="no holder"):
        manager.drop(seq.block_table)
