"""Loads over a window of rounds, against counts by hand."""

import numpy as np

from services.engine.compute.expert_parallel.expert_load import ExpertLoads, fold
from services.engine.contract.runner import ExpertShape

SHAPE = ExpertShape(num_layers=2, num_experts=3, num_slots=4, num_ranks=2)
FIRST = np.array([[0, 1, 2, 0], [0, 1, 2, 0]])


def test_replicas_of_an_expert_are_added_up() -> None:
    per_slot = np.array([[1, 2, 3, 10], [0, 0, 5, 7]])
    assert fold(per_slot, FIRST, 3).tolist() == [[11, 2, 3], [7, 0, 5]]
    other = np.array([[2, 2, 1, 0], [1, 0, 1, 2]])
    assert fold(per_slot, other, 3).tolist() == [[10, 3, 3], [0, 5, 7]]


def test_the_window_keeps_the_last_rounds_alone() -> None:
    loads = ExpertLoads(SHAPE, window=2)
    for tokens in (1, 10, 100):
        loads.count(0, np.array([tokens, 0, 0, tokens]))
        loads.count(1, np.array([0, tokens, 0, 0]))
        loads.end_round(FIRST)
    assert loads.total() == ((220, 0, 0), (0, 110, 0))


def test_a_round_counts_under_the_map_that_it_ran_with() -> None:
    loads = ExpertLoads(SHAPE, window=4)
    loads.count(0, np.array([0, 0, 0, 5]))
    loads.end_round(FIRST)
    loads.count(0, np.array([0, 0, 0, 7]))
    loads.end_round(np.array([[0, 1, 2, 1], [0, 1, 2, 0]]))
    assert loads.total()[0] == (5, 7, 0)


def test_an_open_round_is_not_counted_and_clear_discards_all() -> None:
    loads = ExpertLoads(SHAPE, window=1)
    loads.count(0, np.array([1, 1, 1, 1]))
    assert loads.total()[0] == (0, 0, 0)
    loads.clear()
    loads.end_round(FIRST)
    assert loads.total()[0] == (0, 0, 0)
