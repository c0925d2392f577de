"""Tight memory: who gives way, how much stays free, and when a sequence is looked at again."""

from services.engine.compute.simulated_runner import SimulatedModel

QUIET = SimulatedModel(vocab_size=64, max_model_len=512, eos=63)
PREFIX = [7, 3, 9, 1] * 4
"""Four blocks of four."""


def preempted(driver) -> list[str]:
    return [mark.request_key for mark in driver.marks if mark.preempted]


def admitted(driver) -> list[str]:
    return [mark.request_key for mark in driver.marks if mark.verb == "admit"]


def add(driver, key: str, prompt, tokens: int, **fields) -> None:
    driver.add(key, prompt, max_tokens=tokens, ignore_eos=True, **fields)


def step(driver, count: int) -> None:
    for _ in range(count):
        driver.step()


def rounds_until(done, limit: int = 300):
    """Counts rounds until `done()`; fails instead of looping for ever."""
    for number in range(limit):
        if done():
            return
        yield number
    raise AssertionError(f"not so after {limit} rounds")


def test_a_victims_shared_blocks_do_not_count_as_freed(make_driver):
    """Two sequences share four blocks; preempting one of them frees a block or two."""
    driver = make_driver(QUIET, num_blocks=14)
    add(driver, "head", range(1, 9), 60)
    add(driver, "solo", range(20, 31), 9)
    add(driver, "shares1", [*PREFIX, 11, 12], 9)
    step(driver, 3)
    add(driver, "shares2", [*PREFIX, 13, 14], 9)
    for _ in rounds_until(lambda: preempted(driver)):
        driver.step()
    assert preempted(driver)[0] == "solo", "it frees the most for what it loses"
    driver.run().check_all()


def test_room_is_left_for_the_sequences_that_run(make_driver):
    """A prompt that would fill the memory waits: those that run need a block each soon."""
    driver = make_driver(QUIET, num_blocks=64, max_num_batched_tokens=256)
    for index in range(2):
        add(driver, f"runs{index}", range(index + 1, index + 9), 7)
    step(driver, 2)
    free = 64 - driver.engine.load().held_blocks
    add(driver, "big", [5] * (4 * free), 3)
    driver.run().check_all()
    assert preempted(driver) == []
    assert admitted(driver) == ["runs0", "runs1", "big"]


def test_a_prompt_that_leaves_that_room_is_admitted_at_once(make_driver):
    driver = make_driver(QUIET, num_blocks=64, max_num_batched_tokens=256)
    for index in range(2):
        add(driver, f"runs{index}", range(index + 1, index + 9), 40)
    step(driver, 2)
    free = 64 - driver.engine.load().held_blocks
    add(driver, "fits", [5] * (4 * (free - 2)), 1)
    driver.step()
    assert "fits" in admitted(driver)
    driver.run().check_all()


def test_a_blocked_sequence_is_looked_at_in_the_round_that_registers_its_prefix(make_driver):
    """It does not fit alone, and fits once another sequence has computed the prefix they share."""
    driver = make_driver(QUIET, num_blocks=20)
    prompt = [index % 60 + 1 for index in range(44)]
    add(driver, "first", prompt, 24)
    driver.step()
    add(driver, "second", [*prompt, 61], 2)
    driver.step()
    assert admitted(driver) == ["first"], "11 of 20 blocks are taken, it needs 12"
    driver.step()
    assert admitted(driver) == ["first", "second"], "8 of its blocks are in the prefix map"
    driver.run().check_all()
    assert driver.cached["second"] == 32


def test_a_blocked_sequence_is_looked_at_when_blocks_come_back(make_driver):
    driver = make_driver(QUIET, num_blocks=20)
    add(driver, "first", range(1, 45), 4)
    driver.step()
    add(driver, "second", range(10, 50), 2)
    for _ in rounds_until(lambda: ("first", 0) in driver.reasons):
        driver.step()
        assert "second" not in admitted(driver)
    step(driver, 3)
    assert "second" in admitted(driver)
    driver.run().check_all()


def test_a_blocked_sequence_is_not_tried_again_while_nothing_has_changed(make_driver):
    driver = make_driver(QUIET, num_blocks=20)
    add(driver, "runs", range(1, 42), 60)
    step(driver, 2)
    tried = []
    allocate = driver.engine.scheduler._allocate
    driver.engine.scheduler._allocate = lambda seq, step: tried.append(1) or allocate(seq, step)
    add(driver, "waits", [9] * 60, 2)
    rounds = 12
    step(driver, rounds)
    assert 1 <= len(tried) <= 1 + rounds // 4 + 1, "a try for each block that was filled, at most"
    driver.run().check_all()


def test_a_block_that_comes_back_is_waited_for(make_driver):
    """One needs a block as another leaves: the round in flight gives it back, nothing is lost."""
    driver = make_driver(QUIET, num_blocks=6)
    add(driver, "needs", range(1, 9), 4)
    add(driver, "behind", range(11, 16), 3)
    add(driver, "leaves", range(21, 26), 40)
    driver.step()
    driver.abort("leaves")
    driver.run().check_all()
    assert preempted(driver) == []


def test_a_block_that_comes_back_is_promised_once(make_driver):
    """Two need a block as one comes back: for the second, the last gives way in the same round."""
    driver = make_driver(QUIET, num_blocks=7)
    for index in range(2):
        add(driver, f"needs{index}", range(1 + index, 9 + index), 4)
    add(driver, "behind", range(11, 16), 3)
    add(driver, "leaves", range(21, 24), 40)
    driver.step()
    driver.abort("leaves")
    driver.step()
    assert preempted(driver) == ["behind"]
    driver.run().check_all()


def test_no_more_sequences_run_than_there_are_slots(make_driver):
    driver = make_driver(QUIET, max_num_seqs=3)
    for index in range(8):
        add(driver, f"r{index}", range(1, 9), 6)
    most = 0
    for _ in rounds_until(lambda: not driver.engine.has_unfinished_requests()):
        driver.step()
        most = max(most, driver.engine.load().running_requests)
    assert most == 3
