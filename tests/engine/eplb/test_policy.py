import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.engine.eplb.packing import balanced_packing
from services.engine.eplb.policy import (
    Placement,
    PlacementShapeError,
    balancedness,
    from_phy2log,
    initial_placement,
    rebalance_experts_global,
    rebalance_experts_hierarchical,
)

DATA = json.loads((Path(__file__).parents[2] / "data" / "eplb.json").read_text())
WEIGHT = np.array(DATA["weight"])


def check_placement(placement: Placement, experts: int, num_gpus: int) -> None:
    layers, slots = placement.phy2log.shape
    assert slots % num_gpus == 0
    assert (placement.count >= 1).all()
    assert (placement.count.sum(axis=1) == slots).all()
    for layer in range(layers):
        for expert in range(experts):
            copies = placement.count[layer, expert]
            row = placement.log2phy[layer, expert]
            assert (row[copies:] == -1).all()
            assert sorted(row[:copies]) == list(np.flatnonzero(placement.phy2log[layer] == expert))


def duplicates(placement: Placement, num_gpus: int) -> int:
    by_gpu = np.sort(placement.phy2log.reshape(len(placement.phy2log), num_gpus, -1), axis=2)
    return int((np.diff(by_gpu, axis=2) == 0).any(axis=2).sum())


@pytest.mark.parametrize("spread", [True, False])
def test_hierarchical_gives_the_published_example(spread):
    placement = rebalance_experts_hierarchical(WEIGHT, 16, 4, 2, 8, spread=spread)
    assert placement.phy2log.tolist() == DATA["hierarchical"]["phy2log"]
    assert placement.count[0].tolist() == DATA["hierarchical"]["count_of_layer_0"]
    assert placement.log2phy[0][:5].tolist() == DATA["hierarchical"]["log2phy_of_layer_0_first_5"]


def test_global_gives_the_published_example():
    placement = rebalance_experts_global(WEIGHT, 16, 8, spread=False)
    assert placement.phy2log.tolist() == DATA["global"]["phy2log"]


def test_the_published_global_plan_has_duplicates_and_spreading_removes_them():
    assert duplicates(rebalance_experts_global(WEIGHT, 16, 8, spread=False), 8) == 2
    spread = rebalance_experts_global(WEIGHT, 16, 8)
    assert duplicates(spread, 8) == 0
    check_placement(spread, 12, 8)


def case_load(seed: int, hot: int, experts: int) -> np.ndarray:
    load, x = [], seed
    for _ in range(experts):
        x = (1103515245 * x + 12345) % 2**31
        load.append(200 + (x >> 8) % 20000)
    for h in range(hot):
        load[(seed * 7 + 31 * h) % experts] *= 6
    return np.array([load])


@pytest.mark.parametrize("case", DATA["doubles"], ids=lambda c: f"seed{c['seed']}-hot{c['hot']}")
def test_copies_never_share_a_gpu_and_the_peak_stays(case):
    load = case_load(case["seed"], case["hot"], 256)
    published = rebalance_experts_hierarchical(load, 288, 16, 2, 32, spread=False)
    ours = rebalance_experts_hierarchical(load, 288, 16, 2, 32)
    assert duplicates(published, 32) == case["published_gpus_with_a_double"]
    assert duplicates(ours, 32) == 0
    check_placement(ours, 256, 32)
    assert balancedness(ours, load, 32)[0] >= balancedness(published, load, 32)[0] / 1.02


@st.composite
def shapes(draw):
    nodes = draw(st.integers(1, 3))
    gpus = nodes * draw(st.integers(1, 4))
    groups = nodes * draw(st.integers(1, 3))
    experts = groups * draw(st.integers(1, 4))
    least = -(-experts // gpus)
    replicas = gpus * (least + draw(st.integers(0, 3)))
    layers = draw(st.integers(1, 3))
    loads = st.lists(st.integers(0, 10**6), min_size=experts, max_size=experts)
    weight = draw(st.lists(loads, min_size=layers, max_size=layers))
    return np.array(weight), replicas, groups, nodes, gpus


@given(shapes())
def test_every_expert_is_placed_and_nothing_depends_on_anything_else(shape):
    weight, replicas, groups, nodes, gpus = shape
    placement = rebalance_experts_hierarchical(weight, replicas, groups, nodes, gpus)
    check_placement(placement, weight.shape[1], gpus)
    again = rebalance_experts_hierarchical(weight.copy(), replicas, groups, nodes, gpus)
    assert (placement.phy2log == again.phy2log).all()
    alone = rebalance_experts_hierarchical(weight[:1], replicas, groups, nodes, gpus)
    assert (placement.phy2log[0] == alone.phy2log[0]).all()


@given(shapes())
def test_a_map_read_back_is_the_same_map(shape):
    weight, replicas, groups, nodes, gpus = shape
    made = rebalance_experts_hierarchical(weight, replicas, groups, nodes, gpus)
    read = from_phy2log(made.phy2log, weight.shape[1])
    check_placement(read, weight.shape[1], gpus)
    assert (read.count == made.count).all()


def copies_by_gpu(placement: Placement, num_gpus: int) -> np.ndarray:
    """[layers, gpus, experts]"""
    by_gpu = placement.phy2log.reshape(len(placement.phy2log), num_gpus, -1)
    return (by_gpu[..., None] == np.arange(placement.count.shape[1])).sum(axis=2)


def test_without_load_every_expert_gets_equally_many_copies():  # R2-31
    placement = rebalance_experts_hierarchical(np.zeros((2, 12)), 16, 4, 2, 8)
    assert np.ptp(placement.count, axis=1).tolist() == [1, 1]


@pytest.mark.parametrize(
    ("load", "copies"),
    [((1, 1, 1, 1), [[2, 2, 2, 2]] * 4), ((97, 96, 98, 97), [[2, 2, 2, 2]] * 4)],
)
def test_doubles_that_cannot_be_avoided_are_spread_evenly(load, copies):  # R2-32
    placement = rebalance_experts_global(np.array([load]), 32, 4)
    assert copies_by_gpu(placement, 4)[0].tolist() == copies


def test_a_hot_experts_copies_are_spread_evenly():  # R2-32
    placement = rebalance_experts_global(np.array([[10**6, 1, 1, 1]]), 32, 4)
    assert placement.count.tolist() == [[29, 1, 1, 1]]
    assert sorted(copies_by_gpu(placement, 4)[0, :, 0]) == [7, 7, 7, 8]


@given(shapes())
def test_copies_of_an_expert_differ_by_at_most_one_between_the_gpus_of_a_node(shape):
    weight, replicas, groups, nodes, gpus = shape
    placement = rebalance_experts_hierarchical(weight, replicas, groups, nodes, gpus)
    held = copies_by_gpu(placement, gpus)
    by_node = held.reshape(len(held), nodes, gpus // nodes, -1)
    assert np.ptp(by_node, axis=2).max() <= 1


@given(shapes())
def test_without_load_copies_differ_by_at_most_one(shape):
    weight, replicas, groups, nodes, gpus = shape
    placement = rebalance_experts_hierarchical(weight * 0, replicas, groups, nodes, gpus)
    assert np.ptp(placement.count, axis=1).max() <= 1


def test_packs_are_equally_full():
    packed = balanced_packing(np.array([[5.0, 1, 1, 1, 9, 2]]), 3)
    assert sorted(packed.pack[0].tolist()) == [0, 0, 1, 1, 2, 2]
    assert packed.pack[0, 4] != packed.pack[0, 0]


def test_the_first_placement_repeats_the_experts_from_zero():
    assert initial_placement(1, 4, 6).phy2log.tolist() == [[0, 1, 2, 3, 0, 1]]


@pytest.mark.parametrize(
    ("replicas", "groups", "nodes", "gpus", "named"),
    [(11, 4, 2, 8, "cannot hold"), (15, 4, 2, 8, "GPUs"), (16, 4, 3, 8, "nodes")],
)
def test_shapes_that_do_not_fit_are_refused(replicas, groups, nodes, gpus, named):
    with pytest.raises(PlacementShapeError, match=named):
        rebalance_experts_hierarchical(WEIGHT, replicas, groups, nodes, gpus)


def test_a_map_without_a_replica_is_refused_with_the_layer_and_expert():
    with pytest.raises(PlacementShapeError, match="layer 1: expert 2 has no replica"):
        from_phy2log(np.array([[0, 1, 2, 0], [0, 1, 1, 0]]), 3)
