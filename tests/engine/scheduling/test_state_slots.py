"""Fixed-size state: a slot with the blocks or neither; snapshots, and restarts from them."""

from dataclasses import replace

import pytest

from services.common.config.settings import ConfigError
from services.common.errors import ResourceExhaustedError
from services.engine.compute.simulated_runner import SimulatedModel, SimulatedRunner
from services.engine.contract.config import EngineConfig
from services.engine.contract.messages import RemovedBlocks, StoredBlocks
from services.engine.contract.runner import StateBlock, StateReplay
from services.engine.core.timing import RoundTimer
from services.engine.scheduling.cache_events import CacheEvents
from services.engine.scheduling.kv_cache import KVCacheManager
from services.engine.scheduling.state_slots import StateSlots

STATEFUL = SimulatedModel(vocab_size=64, max_model_len=128, eos=63, state_boundary=8)
PROMPT = [index % 50 + 1 for index in range(30)]


def finish(driver, key: str, prompt, tokens: int = 4, **fields) -> int:
    """Run a request alone; returns its cached tokens."""
    driver.add(key, prompt, max_tokens=tokens, ignore_eos=True, **fields)
    driver.run().check(key)
    return driver.cached.get(key, 0)


def test_a_hit_restarts_at_the_last_snapshot(make_driver):
    driver = make_driver(STATEFUL)
    assert finish(driver, "first", PROMPT) == 0
    assert finish(driver, "longer", [*PROMPT, 5, 6]) == 24, "the last boundary of the first prompt"
    assert finish(driver, "same", PROMPT) == 24
    assert finish(driver, "short", PROMPT[:25]) == 24
    driver.check_all()


def test_with_replay_a_hit_needs_no_snapshot(make_driver):
    """It computes the last 6 positions of the cached history again, which write none."""
    driver = make_driver(replace(STATEFUL, state_boundary=2, state_replay=6), state_slots=1)
    assert finish(driver, "first", PROMPT) == 0
    assert finish(driver, "longer", [*PROMPT, 5, 6]) == 28 - 6
    assert finish(driver, "short", PROMPT[:25]) == 24 - 6
    assert finish(driver, "shorter than a replay", PROMPT[:5]) == 0
    assert driver.engine._blocks.states.slots.contents() == []
    driver.check_all()


def test_history_without_a_snapshot_is_computed_again_and_gets_one(make_driver):
    """A prompt that leaves the first one's way finds history but no snapshot there; the third,
    which leaves it at the same place, finds the one that the second has made."""
    driver = make_driver(STATEFUL)
    finish(driver, "first", PROMPT)
    assert finish(driver, "second", [*PROMPT[:18], 60, 61, 62]) == 0
    assert finish(driver, "third", [*PROMPT[:18], 51, 52]) == 16
    driver.check_all()


def test_an_earlier_snapshot_of_longer_history_is_where_a_hit_restarts(make_driver):
    driver = make_driver(STATEFUL)
    long = [*PROMPT, *range(40, 50)]
    finish(driver, "first", long)  # leaves history of 40 positions and a snapshot after 32
    finish(driver, "second", [*long[:18], 60, 61, 62])  # and this one a snapshot after 16
    assert finish(driver, "third", [*long[:26], 51, 52]) == 16, "24 positions are in the cache"
    assert finish(driver, "fourth", [*long[:26], 53]) == 24, "the third made a snapshot there"
    driver.check_all()


def test_a_snapshot_without_its_history_goes_with_it(make_driver):
    driver = make_driver(STATEFUL, num_blocks=10)
    finish(driver, "first", PROMPT)
    states = driver.engine._blocks.states
    assert states.slots.contents()
    finish(driver, "other", [60] * 36, 1)
    driver.engine.check_integrity()
    kinds = [(type(e).__name__, e.kind) for e in driver.engine.drain_cache_events()]
    assert ("RemovedBlocks", "state") in kinds
    assert finish(driver, "again", PROMPT) == 0


def test_events_and_the_snapshot_list_both_kinds(make_driver):
    driver = make_driver(STATEFUL)
    finish(driver, "first", PROMPT[:17], 1)
    stored = [e for e in driver.engine.drain_cache_events() if isinstance(e, StoredBlocks)]
    states = [h for event in stored if event.kind == "state" for h in event.hashes]
    history = [h for event in stored if event.kind == "history" for h in event.hashes]
    assert states == [history[3]], "after 16 of 17 tokens"
    listed = driver.engine.cache_snapshot()
    assert [event.kind for event in listed] == ["history", "state"]
    assert listed[1].hashes == states


@pytest.mark.parametrize("slots", [1, 2, 3])
def test_few_slots_admit_one_after_the_other_and_never_fail(make_driver, slots):
    driver = make_driver(STATEFUL, state_slots=slots)
    for index in range(5):
        driver.add(f"r{index}", [*PROMPT[: 9 + index], index + 1], max_tokens=6, ignore_eos=True)
    running = 0
    while driver.engine.has_unfinished_requests():
        driver.step()
        running = max(running, driver.engine.scheduler.num_running)
    driver.check_all()
    assert running == min(slots, 5)


def test_capacity_counts_the_slots_of_state(make_driver):
    """A balancer that is told more would send requests here to wait."""
    driver = make_driver(STATEFUL, state_slots=2, max_num_seqs=8, max_waiting=0)
    scheduler = driver.engine.scheduler
    assert (scheduler.max_running, scheduler.free_slots) == (2, 2)
    driver.add("a", PROMPT, max_tokens=4)
    driver.add("b", PROMPT, max_tokens=4)
    with pytest.raises(ResourceExhaustedError):
        driver.add("c", PROMPT, max_tokens=4)
    driver.run()
    assert make_driver(STATEFUL, state_slots=9, max_num_seqs=8).engine.scheduler.max_running == 8


def test_a_preempted_sequence_restarts_from_its_own_snapshot(make_driver):
    driver = make_driver(STATEFUL, num_blocks=12, max_num_batched_tokens=16)
    driver.add("a", range(1, 18), max_tokens=12, ignore_eos=True)
    driver.add("b", range(20, 37), max_tokens=24, ignore_eos=True)
    driver.run().check_all()
    preempted = next(i for i, mark in enumerate(driver.marks) if mark.preempted)
    key = driver.marks[preempted].request_key
    again = [m for m in driver.marks[preempted + 1 :] if m.request_key == key and m.tokens]
    starts = [mark.start for mark in again if mark.verb == "submit"]
    assert starts[:1] == [16], "the boundary up to which the other left its history"


def test_a_slot_is_freed_for_a_request_of_higher_priority(make_driver):
    driver = make_driver(STATEFUL, state_slots=1, policy="priority")
    driver.add("low", PROMPT, max_tokens=40, ignore_eos=True)
    for _ in range(3):
        driver.step()
    driver.add("high", [3, 4, 5], priority=5, max_tokens=3, ignore_eos=True)
    driver.run().check_all()
    ended = [mark.request_key for mark in driver.marks if mark.end]
    assert ended == ["high", "low"]


def test_choices_restart_from_the_prompts_snapshot_and_draw_their_own_tokens(make_driver):
    driver = make_driver(STATEFUL)
    driver.add("n", PROMPT, n=3, temperature=1.0, max_tokens=12, ignore_eos=True)
    driver.run().check_all()
    assert len({tuple(driver.tokens["n", choice]) for choice in range(3)}) == 3
    starts = [mark.start for mark in driver.marks if mark.verb == "submit"]
    assert starts == [0, 24, 24, 24], "the first, cut at the boundary, and the two others"


@pytest.mark.parametrize("fields", [{"cache_bypass": True}, {"prompt_logprobs": True}])
def test_requests_that_must_compute_everything_start_from_a_clear_state(make_driver, fields):
    driver = make_driver(STATEFUL)
    finish(driver, "first", PROMPT)
    assert finish(driver, "own", PROMPT, **fields) == 0


def test_a_stream_resumes_on_another_engine_with_the_same_tokens(make_driver):
    first, second = make_driver(STATEFUL), make_driver(STATEFUL, max_num_batched_tokens=8)
    finish(first, "r", PROMPT, 30)
    whole = first.tokens["r", 0]
    finish(second, "warm", PROMPT, 1)
    second.add("r", PROMPT, continued=[whole[:13]], max_tokens=30, ignore_eos=True)
    second.run().check_all()
    assert whole[:13] + second.tokens["r", 0] == whole
    assert second.cached["r"] == 24


def test_nothing_of_a_spoilt_round_becomes_a_snapshot(make_driver):
    class Spoilt(SimulatedRunner):
        def execute_sample(self, step, hidden, rows):
            output = super().execute_sample(step, hidden, rows)
            return replace(output, nan_rows=tuple(range(len(rows))))

    driver = make_driver(STATEFUL, runner=lambda: Spoilt(4, STATEFUL))
    driver.add("r", range(1, 17), max_tokens=3)
    driver.run()
    assert driver.failures == {"r": "DATA_LOSS"}
    assert driver.engine._blocks.states.slots.contents() == []
    assert driver.engine._blocks.states.slots.num_held == 0


def test_a_clear_of_the_cache_drops_snapshots_too(make_driver):
    driver = make_driver(STATEFUL)
    finish(driver, "first", PROMPT)
    driver.engine.scheduler.clear_cache()
    driver.engine.check_integrity()
    assert finish(driver, "again", PROMPT) == 0


@pytest.mark.parametrize("slots", [4, 9])
def test_an_answer_keeps_one_snapshot_and_evicts_none_of_a_prompt(make_driver, slots):
    """With 4 slots none is free when the answer passes its second boundary."""
    driver = make_driver(STATEFUL, state_slots=slots)
    finish(driver, "a", PROMPT[:17], 1)
    finish(driver, "b", [60, *PROMPT[:17]], 1)
    finish(driver, "long", [61, 62, 3], 60)
    assert len(driver.engine._blocks.states.slots.contents()) == 3
    turn = [61, 62, 3, *driver.tokens["long", 0], 5]
    assert finish(driver, "a again", PROMPT[:17], 1) == 16
    assert finish(driver, "b again", [60, *PROMPT[:17]], 1) == 16
    assert finish(driver, "next turn", turn, 1) == 56, "the last boundary of the answer"
    driver.check_all()


def test_a_snapshot_that_another_made_is_not_replaced(make_driver):
    """The same answer again, and further: the conversation of the first restarts at its end."""
    driver = make_driver(STATEFUL)
    finish(driver, "first", PROMPT, 12)
    finish(driver, "again", PROMPT, 24)
    assert finish(driver, "turn", [*PROMPT, *driver.tokens["first", 0], 60], 1) == 40
    driver.check_all()


def test_a_hit_takes_the_snapshot_itself_if_no_other_slot_is_available(make_driver):
    driver = make_driver(STATEFUL, state_slots=2, policy="priority")
    finish(driver, "first", PROMPT, 1)
    driver.add("runs", [60, 61, 62], max_tokens=30, ignore_eos=True)
    driver.step()
    driver.add("hit", [*PROMPT, 5], priority=5, max_tokens=9, ignore_eos=True)
    driver.step()
    assert driver.engine.scheduler.num_running == 2
    assert driver.engine._blocks.states.slots.contents() == []
    driver.run().check_all()
    assert driver.cached["hit"] == 24
    assert not any(mark.preempted for mark in driver.marks)


def test_a_slot_that_was_a_snapshot_is_neither_cleared_nor_copied_nor_found():
    states = StateSlots(2, StateBlock(8, 8), 4, CacheEvents())
    other, mine = states.start(None), states.slots.take()
    states.slots.register(mine, b"content", None)
    states.slots.drop(mine)
    assert states.start(mine) == mine
    assert states.find(b"content") is None
    states.slots.check_integrity({other: 1, mine: 1})
    states.cancel_start(mine)
    assert states.take_starts() == ((other,), ())


def test_nobody_is_preempted_for_a_slot_that_a_snapshot_in_flight_gives_back(make_driver):
    driver = make_driver(STATEFUL, state_slots=2, policy="priority")
    driver.add("low", PROMPT[:9], max_tokens=20, ignore_eos=True)
    driver.step()
    assert driver.engine._blocks.states.slots.num_available == 0, "a snapshot after 8 tokens"
    driver.add("high", [60, 61], priority=5, max_tokens=9, ignore_eos=True)
    for _ in range(2):
        driver.step()
    assert driver.engine.scheduler.num_running == 2
    driver.run().check_all()
    assert not any(mark.preempted for mark in driver.marks)


def test_choices_that_compute_the_prompt_again_are_work_ahead_of_others(make_driver):
    class Measured(RoundTimer):
        best_prefill_tokens_per_s = property(lambda self: 10.0, lambda self, rate: None)

    driver = make_driver(STATEFUL, prefix_cache=False, now_ns=lambda: 1000 * 10**9)
    driver.engine._timer = Measured(lambda: 1000.0)
    driver.add("n", PROMPT, n=3, max_tokens=2)
    driver.step()
    with pytest.raises(ResourceExhaustedError, match=r"^60 prompt tokens of other requests"):
        driver.add("late", PROMPT[:10], deadline=1004.0)
    driver.run().check_all()


def test_a_window_beside_state_is_refused_at_the_start(make_driver):
    both = replace(STATEFUL, window=6)
    with pytest.raises(
        ConfigError, match=r"^model: fake declares a window of 6 positions and a state of 256 bytes"
    ):
        make_driver(both)
    with pytest.raises(ValueError, match="a state of 0 bytes"):
        StateBlock(0, 4)


INFO = replace(
    SimulatedRunner(32, SimulatedModel(max_model_len=1024)).describe(),
    kv_bytes_per_block=1000,
    state=StateBlock(5000, 128),
)


def test_slots_take_at_most_half_of_the_memory():
    config = EngineConfig(kv_memory="1.0", max_num_seqs=4)
    plan = KVCacheManager.plan(config, INFO, 1_000_000)
    assert (plan.num_states, plan.state_bytes) == (8, 45_000)
    assert plan.kv_bytes <= 1_000_000
    assert KVCacheManager.plan(config, INFO, 66_000).num_states == 5
    few = EngineConfig(num_blocks=3, max_num_seqs=4)
    assert KVCacheManager.plan(few, INFO, 0).num_states == 8
    uncached = replace(few, prefix_cache=False)
    assert KVCacheManager.plan(uncached, INFO, 0).num_states == 4, "none for snapshots"
    replayed = replace(INFO, state=StateBlock(5000, 2, StateReplay(6, 2, 3)))
    assert KVCacheManager.plan(few, replayed, 0).num_states == 4, "none for snapshots"


def test_memory_without_room_for_one_request_and_its_state_names_what_would_fit():
    config = EngineConfig(kv_memory="1.0", max_num_seqs=4)
    assert KVCacheManager.plan(config, INFO, 43_000).num_states == 1
    with pytest.raises(ConfigError, match=r"less than one request.*at most 992") as caught:
        KVCacheManager.plan(config, INFO, 42_999)
    assert "1 slots of state, each of 5000 bytes" in str(caught.value)
    with pytest.raises(ConfigError, match="or set state_slots lower"):
        KVCacheManager.plan(replace(config, state_slots=7), INFO, 60_000)
    with pytest.raises(ConfigError, match="raise kv_memory") as caught:
        KVCacheManager.plan(config, INFO, 900)
    assert "at most 0" not in str(caught.value)
    assert RemovedBlocks([b""]).kind == "history"
