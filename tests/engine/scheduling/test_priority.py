"""Policy `priority`: who waits takes seat and blocks from running work of lower priority."""

import hypothesis.strategies as st
import pytest
from hypothesis import given

from services.engine.compute.simulated_runner import SimulatedModel
from services.engine.scheduling.policies import Victim, choose_victims

QUIET = SimulatedModel(vocab_size=64, max_model_len=512, eos=63)
HIGHEST, LOWEST = 2**31 - 1, -(2**31)


def victims(*pairs: tuple[int, int, int]) -> list[Victim]:
    """From (priority, lost tokens, freed blocks)."""
    return [Victim(i, p, lost, freed, arrival=i) for i, (p, lost, freed) in enumerate(pairs)]


def test_the_lowest_priority_goes_first_and_no_more_than_needed():
    several = victims((0, 10, 2), (-1, 900, 2), (0, 5, 2))
    assert choose_victims(several, slots=1, blocks=0) == [1]
    assert choose_victims(several, slots=1, blocks=3) == [1, 2]
    assert choose_victims(several, slots=0, blocks=0) == []


def test_nobody_is_preempted_in_vain():
    assert choose_victims(victims((0, 10, 2), (0, 5, 2)), slots=1, blocks=5) == []
    assert choose_victims([], slots=1, blocks=0) == []


def test_one_that_frees_nothing_gives_a_seat_only():
    shared = victims((0, 0, 0), (0, 50, 4))
    assert choose_victims(shared, slots=1, blocks=0) == [0]
    assert choose_victims(shared, slots=0, blocks=4) == [1]


@given(
    st.lists(st.tuples(st.integers(-2, 2), st.integers(0, 99), st.integers(0, 5)), max_size=8),
    st.integers(-1, 4),
    st.integers(-3, 12),
)
def test_they_are_enough_or_none(pairs, slots, blocks):
    listed = victims(*pairs)
    chosen = choose_victims(listed, slots, blocks)
    assert len(set(chosen)) == len(chosen)
    freed = sum(listed[i].freed_blocks for i in chosen)
    if chosen:
        assert len(chosen) >= slots
        assert freed >= blocks
    elif slots > 0 or blocks > 0:
        all_blocks = sum(v.freed_blocks for v in listed)
        assert len(listed) < slots or all_blocks < blocks


def admitted(driver) -> list[str]:
    return [m.request_key for m in driver.marks if m.verb == "admit"]


def preempted(driver) -> list[str]:
    return [m.request_key for m in driver.marks if m.preempted]


def first_token_after(driver, key: str, most: int) -> int:
    """Rounds until the request has a token."""
    for count in range(most):
        if driver.tokens[(key, 0)]:
            return count
        driver.step()
    raise AssertionError(f"{key} has no token after {most} rounds")


def test_an_urgent_request_takes_a_seat_within_a_few_rounds(make_driver):
    driver = make_driver(QUIET, policy="priority", max_num_seqs=2)
    driver.add("old", range(1, 9), max_tokens=200, ignore_eos=True)
    driver.add("new", range(11, 15), max_tokens=200, ignore_eos=True)
    for _ in range(4):
        driver.step()
    driver.add("urgent", range(21, 30), priority=1, max_tokens=3, ignore_eos=True)
    # Preempted, admitted, computed, collected.
    assert first_token_after(driver, "urgent", 6) <= 4
    assert preempted(driver) == ["new"], "the one that loses the least work"
    driver.run().check_all()


def test_an_urgent_request_takes_blocks(make_driver):
    driver = make_driver(QUIET, policy="priority", num_blocks=20, max_num_seqs=8)
    driver.add("big", range(1, 41), max_tokens=30, ignore_eos=True)
    driver.add("small", range(41, 49), max_tokens=8, ignore_eos=True)
    for _ in range(3):
        driver.step()
    driver.add("urgent", [7] * 40, priority=5, max_tokens=3, ignore_eos=True)
    assert first_token_after(driver, "urgent", 8) <= 5
    assert "big" in preempted(driver)
    driver.run().check_all()


def test_equals_do_not_preempt_one_another(make_driver):
    driver = make_driver(QUIET, policy="priority", max_num_seqs=1)
    driver.add("runs", range(1, 9), priority=3, max_tokens=20, ignore_eos=True)
    driver.step()
    for index, priority in enumerate((3, 3, 2)):
        driver.add(f"w{index}", range(1, 9), priority=priority, max_tokens=2, ignore_eos=True)
    driver.run().check_all()
    assert not preempted(driver)
    assert admitted(driver) == ["runs", "w0", "w1", "w2"]


def test_nobody_gives_way_to_one_that_still_would_not_fit(make_driver):
    driver = make_driver(QUIET, policy="priority", num_blocks=20)
    driver.add("urgent too", range(1, 49), priority=9, max_tokens=20, ignore_eos=True)
    driver.add("small", range(51, 55), max_tokens=8, ignore_eos=True)
    for _ in range(3):
        driver.step()
    driver.add("big", [7] * 60, priority=5, max_tokens=2, ignore_eos=True)
    for _ in range(5):
        driver.step()
    assert not preempted(driver)
    driver.run().check_all()


def test_other_policies_do_not_preempt_for_whoever_waits(make_driver):
    driver = make_driver(QUIET, policy="fcfs", max_num_seqs=1)
    driver.add("runs", range(1, 9), max_tokens=30, ignore_eos=True)
    driver.step()
    driver.add("urgent", range(1, 9), priority=HIGHEST, max_tokens=2, ignore_eos=True)
    driver.run().check_all()
    assert not preempted(driver)


def test_an_urgent_prompt_goes_before_a_half_computed_one(make_driver):
    driver = make_driver(QUIET, policy="priority", num_blocks=300, max_num_batched_tokens=16)
    driver.add("long", [5] * 400, max_tokens=1)
    driver.step()
    driver.add("urgent", [6] * 64, priority=1, max_tokens=1)
    rounds = [driver.step() for _ in range(4)]
    chunks = [(m.request_key, m.tokens) for r in rounds for m in r.marks if m.tokens is not None]
    assert sum(count for key, count in chunks if key == "urgent") == 64, chunks
    driver.run().check_all()


@pytest.mark.parametrize("order", [(HIGHEST, LOWEST), (LOWEST, HIGHEST)])
def test_the_whole_range_of_the_contract_is_taken(make_driver, order):
    driver = make_driver(QUIET, policy="priority", max_num_seqs=1)
    for index, priority in enumerate(order):
        driver.add(f"p{index}", range(1, 9), priority=priority, max_tokens=4, ignore_eos=True)
    driver.run().check_all()
    highest = f"p{order.index(HIGHEST)}"
    assert admitted(driver)[0] == highest
    assert highest not in preempted(driver)


def test_a_choice_of_many_and_a_constraint_free_seed_survive_being_preempted(make_driver):
    driver = make_driver(QUIET, policy="priority", max_num_seqs=4)
    driver.add("many", range(1, 23), n=4, temperature=1.0, max_tokens=30, ignore_eos=True)
    for _ in range(6):
        driver.step()
    for index in range(3):
        driver.add(f"u{index}", range(30, 40), priority=1, max_tokens=5, ignore_eos=True)
        for _ in range(4):
            driver.step()
    driver.run().check_all()
    assert set(preempted(driver)) == {"many"}


@pytest.mark.parametrize(("budget", "length", "tokens"), [(4, 31, 18), (6, 32, 17)])
def test_a_choice_waits_for_a_prompt_that_is_computed_again(make_driver, budget, length, tokens):
    """The first choice makes way and comes back in chunks, as a slot for the second gets free.

    That is in the middle of the prompt, or in the round that computes its end.
    """
    driver = make_driver(
        QUIET,
        policy="priority",
        max_num_seqs=2,
        max_num_batched_tokens=budget,
        prefix_cache=False,
    )
    driver.add("old", range(1, 5), max_tokens=tokens, ignore_eos=True)
    driver.add("many", range(length), n=2, temperature=1.0, max_tokens=6, ignore_eos=True)
    while not driver.tokens[("many", 0)]:
        driver.step()
    driver.add("urgent", range(30, 33), priority=1, max_tokens=2, ignore_eos=True)
    driver.run().check_all()


@pytest.mark.parametrize("rounds", [0, 1, 2, 5])
def test_one_that_made_way_can_be_cancelled_at_any_time(make_driver, rounds):
    driver = make_driver(QUIET, policy="priority", max_num_seqs=2)
    driver.add("low", range(1, 30), n=2, temperature=1.0, max_tokens=100, ignore_eos=True)
    for _ in range(5):
        driver.step()
    driver.add("urgent", range(31, 50), n=2, priority=1, max_tokens=20, ignore_eos=True)
    while not preempted(driver):
        driver.step()
    for _ in range(rounds):
        driver.step()
    assert driver.abort("low")
    driver.run().check_all()
    assert not any(name[0] == "low" for name in driver.reasons)
