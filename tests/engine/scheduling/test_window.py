"""Sliding windows: blocks before the window come back, and prefixes are usable without them."""

import pytest

from services.common.block_hash import root
from services.engine.compute.simulated_runner import SimulatedModel
from services.engine.contract.sampling_params import SamplingParams
from services.engine.scheduling.block_manager import BlockManager
from services.engine.scheduling.sequence import Request, Sequence
from services.engine.scheduling.window import first_in_window, longest_prefix

SLIDING = SimulatedModel(vocab_size=64, max_model_len=256, eos=63, window=6)


def make_seq(tokens, seq_id=0, **params) -> Sequence:
    request = Request(
        key=str(seq_id),
        prompt=tuple(tokens),
        params=SamplingParams(**params),
        arrival=seq_id,
        root_hash=root(b"namespace"),
        end_ids=frozenset(),
        max_length=1000,
    )
    return Sequence(seq_id, request, 0)


@pytest.fixture
def manager() -> BlockManager:
    return BlockManager(8, 4, window=6)


def computed(manager: BlockManager, tokens, **fields) -> Sequence:
    seq = make_seq(tokens, **fields)
    assert manager.try_allocate_seq(seq) is not None
    manager.register_computed(seq, len(tokens))
    manager.release_passed(seq, len(tokens))
    return seq


def test_the_first_position_that_a_round_reads():
    assert [first_in_window(start, 6) for start in (0, 5, 6, 20)] == [0, 0, 1, 15]
    assert first_in_window(1000, 0) == 0


@pytest.mark.parametrize(
    ("found", "length", "usable"),
    [
        ([1, 2, 3], 14, [0, 2, 3]),  # position 12 reads 7 to 12
        ([None, 2, 3], 14, [0, 2, 3]),
        ([1, None, 3], 14, [1]),
        ([1, 2, 3], 12, [0, 2, 3]),  # position 11, the last one, reads 6 to 11
        ([None, 2, 3], 12, [0, 2, 3]),
        ([1, 2, None, 4], 17, [1, 2]),
        ([None, None, 3], 14, []),
        ([], 3, []),
    ],
)
def test_a_prefix_is_usable_if_its_last_window_is_cached(found, length, usable):
    assert longest_prefix(found, 4, 6, length) == usable


def test_blocks_before_the_window_are_released_and_stay_reusable(manager):
    seq = computed(manager, range(18))
    assert seq.block_table[:2] == (0, 0)  # position 16, where a hit begins, reads 11 to 16
    assert all(seq.block_table[2:])
    assert manager.num_available == 5
    manager.check_integrity([seq.block_table])
    again = make_seq([*range(12), 50], seq_id=1)
    assert manager.try_allocate_seq(again) == (12, None)
    assert again.block_table[0] == 0, "position 12 reads 7 to 12: the first block is not needed"
    assert all(again.block_table[1:]), "released blocks are found by their content"
    manager.check_integrity([seq.block_table, again.block_table])


def test_a_prefix_without_its_first_blocks_is_a_hit(manager):
    seq = computed(manager, range(20))
    taken = make_seq(range(100, 124), seq_id=1)  # the three released blocks are evicted
    assert manager.try_allocate_seq(taken) is not None
    manager.drop(reversed(taken.remove_blocks()))
    prompt = [*range(20), 70, 71]
    assert manager.count_uncached([make_seq(prompt, seq_id=3)]) == 2
    more = make_seq(prompt, seq_id=2)
    assert manager.num_missing(more, None, 0) == 1 - manager.num_available
    assert manager.try_allocate_seq(more).num_computed == 20
    assert more.block_table[:3] == (0, 0, 0)
    manager.check_integrity([seq.block_table, more.block_table])


@pytest.mark.parametrize("window", [1, 4, 5, 6, 9])
@pytest.mark.parametrize("length", [16, 17, 18, 19])
def test_the_last_full_block_is_usable_whatever_was_computed_after_it(window, length):
    """Also by the same prompt, if it ends there: its last position is computed again."""
    manager = BlockManager(8, 4, window=window)
    seq = computed(manager, range(length))
    taken = make_seq(range(100, 100 + 4 * manager.num_available), seq_id=1)
    assert manager.try_allocate_seq(taken) is not None
    manager.drop(reversed(taken.remove_blocks()))
    for prompt, cached in (([*range(16), 70], 16), (range(16), 15)):
        again = make_seq(prompt, seq_id=2)
        allocation = manager.try_allocate_seq(again)
        assert allocation.num_computed == cached
        source = allocation.copy[:1] if allocation.copy else ()
        manager.check_integrity([seq.block_table, again.block_table, source])
        manager.drop([*source, *reversed(again.remove_blocks())])


@pytest.mark.parametrize("window", [0, 6])
def test_what_rounds_in_flight_compute_is_not_counted_as_work(window):
    manager = BlockManager(14, 4, window=window)
    ahead, seq = make_seq(range(40)), make_seq([*range(40), 70, 71], seq_id=1)
    assert manager.count_uncached([ahead, seq]) == 42
    manager.try_allocate_seq(ahead)
    ahead.planned(1, 20, None)
    manager.register_computed(ahead, 20)
    manager.release_passed(ahead, 20)
    ahead.planned(2, 28, None)
    assert manager.count_uncached([ahead, seq]) == 12 + 2


def test_a_fork_shares_no_block_that_its_parent_may_release():
    manager = BlockManager(12, 4, window=6)
    parent, early, late = (make_seq(range(10), seq_id=index) for index in range(3))
    manager.try_allocate_seq(parent)
    manager.register_computed(parent, 10)
    assert manager.shares_prompt(parent)
    assert manager.try_fork_seq(early, parent) == (9, (parent.block_table[2], early.block_table[2]))
    assert early.block_table[:2] == (0, parent.block_table[1]), "position 9 reads 4 to 9"
    parent.tokens += range(8)
    while parent.capacity < 18:
        assert manager.grow(parent)
    manager.register_computed(parent, 18)
    manager.release_passed(parent, 18)
    assert not manager.shares_prompt(parent), "position 9 reads from block 1 on"
    assert manager.try_allocate_seq(late).num_computed == 8
    assert manager.num_missing(make_seq(range(10), seq_id=4), None, 12) > 0


def test_a_long_answer_needs_no_more_blocks_than_its_window(make_driver):
    """Two sequences of 120 tokens in 12 blocks of 4: without a release the second one waits."""
    driver = make_driver(SLIDING, num_blocks=31, max_num_batched_tokens=8)
    for key in ("first", "second"):
        driver.add(key, [len(key), 2, 3], max_tokens=110, ignore_eos=True)
    most = 0
    while driver.engine.has_unfinished_requests():
        driver.step()
        most = max(most, driver.engine.load().held_blocks)
    driver.check_all()
    assert most <= 8, "window, block of the next position, and one that is being left, each"
    assert not any(mark.preempted for mark in driver.marks)


@pytest.mark.parametrize("cut", [4, 8, 13, 32])
def test_chunks_choices_and_a_resumed_stream_give_the_same_tokens(make_driver, cut):
    driver = make_driver(SLIDING, max_num_batched_tokens=cut)
    prompt = [index % 50 + 1 for index in range(30)]
    driver.add("whole", prompt, n=3, temperature=1.0, max_tokens=20, ignore_eos=True)
    driver.run()
    driver.add("again", [*prompt, 7], max_tokens=9, ignore_eos=True)
    given = driver.tokens["whole", 0][:11]
    driver.add(
        "resumed", prompt, continued=[given], temperature=1.0, max_tokens=20, ignore_eos=True
    )
    driver.run().check_all()
    assert driver.cached["again"] == 28
    assert given + driver.tokens["resumed", 0] == driver.tokens["whole", 0]
