"""A plan balances the load, moves few experts, and is written only if it gains enough."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.engine.contract.runner import ExpertShape
from services.engine.eplb.placement_map import Applied, Rejection, problem_with
from services.engine.eplb.placement_store import GroupState
from services.engine.eplb.planning import (
    PlanSettings,
    draft_map,
    keep_slots,
    make_plan,
    reason_to_keep,
    slots_in_use,
    sum_loads,
)
from services.engine.eplb.policy import PlacementShapeError

REVISION = "sha256:abc"


def plan_for(loads, shape, **settings):
    total = sum_loads(loads, shape, REVISION)
    return make_plan(total, slots_in_use(None, shape, REVISION), shape, PlanSettings(**settings))


def test_loads_of_other_shapes_and_weights_do_not_count(make_loads, shape):
    records = [
        make_loads("a", (1, 2, 3, 4)),
        make_loads("b", (10, 20, 30, 40)),
        make_loads("c", num_ranks=3),
        make_loads("d", model_revision="sha256:other"),
    ]
    assert sum_loads(records, shape, REVISION).tolist() == [[11, 22, 33, 44]] * 2
    assert not sum_loads([], shape, REVISION).any()


def test_before_any_map_the_engines_first_one_is_in_use(make_map, shape):
    first = [[0, 1, 2, 3, 0, 1]] * 2
    assert slots_in_use(None, shape, REVISION).tolist() == first
    assert slots_in_use(make_map(1, num_ranks=3), shape, REVISION).tolist() == first
    assert slots_in_use(make_map(1, row=(3, 2, 1, 0, 3, 2)), shape, REVISION)[0, 0] == 3


@pytest.mark.parametrize("policy", ["global", "hierarchical"])
def test_a_hot_expert_gets_copies_on_both_ranks(make_loads, shape, policy):
    plan = plan_for([make_loads()], shape, policy=policy)
    for row in plan.new.tolist():
        assert 0 in row[:3]
        assert 0 in row[3:]
    # The first map already has expert 0 on both ranks: 350 + 50 + 100 beside 100 + 350 + 50.
    assert (plan.before == 1.0).all()
    skewed = plan_for([make_loads(row=(10, 10, 700, 10))], shape, policy=policy)
    assert skewed.before.max() < 0.6
    assert skewed.after.min() > 0.75
    assert skewed.gain > 0.2


def test_the_draft_fits_and_says_where_it_is_from(make_loads, shape):
    plan = plan_for([make_loads(row=(10, 10, 700, 10))], shape)
    made = draft_map(
        plan,
        shape,
        model="moe",
        model_revision=REVISION,
        window_rounds=100,
        author="me",
        created_unix_ms=5,
    )
    assert problem_with(made, shape, REVISION, draft=True) is None
    assert made.load == ((10, 10, 700, 10),) * 2
    assert made.balance_before < made.balance_after <= 1
    assert (made.policy, made.version, made.window_rounds) == ("global", 0, 100)


def test_a_layer_that_the_policy_would_balance_worse_stays_as_it_is(make_loads, shape):
    """The policies are greedy: expert 1, hot and already on both ranks, would get a third copy."""
    plan = plan_for([make_loads(load=((10, 10, 700, 10), (10, 700, 10, 10)))], shape)
    assert plan.before[1] == plan.after[1] == 1.0
    assert plan.moved[0] > 0
    assert plan.moved[1] == 0


@given(st.lists(st.integers(0, 1000), min_size=8, max_size=8))
def test_a_plan_is_never_worse_than_what_is_in_use(counts):
    shape = ExpertShape(num_layers=2, num_experts=4, num_slots=6, num_ranks=2)
    old = slots_in_use(None, shape, REVISION)
    plan = make_plan(np.array(counts).reshape(2, 4), old, shape, PlanSettings())
    assert (plan.after >= plan.before).all()
    assert all(set(row) == {0, 1, 2, 3} for row in plan.new.tolist())


def test_what_stays_on_a_rank_keeps_its_slot():
    old = np.array([[0, 1, 2, 3, 4, 5]])
    new = np.array([[2, 6, 0, 5, 5, 3]])
    assert keep_slots(old, new, 2).tolist() == [[0, 6, 2, 3, 5, 5]]


@given(st.data())
def test_reordering_changes_no_rank(data):
    size, ranks = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 3))
    row = st.lists(st.integers(0, 5), min_size=size * ranks, max_size=size * ranks)
    old, new = (np.array([data.draw(row)]) for _ in range(2))
    kept = keep_slots(old, new, ranks)
    by_rank = [np.sort(m.reshape(ranks, size), axis=1).tolist() for m in (kept, new)]
    assert by_rank[0] == by_rank[1]
    assert (kept != old).sum() <= (new != old).sum()


def test_a_map_is_not_written_for_little(make_loads, make_map, shape):
    skewed = plan_for([make_loads(row=(10, 10, 700, 10))], shape)
    assert reason_to_keep(skewed, GroupState()) is None
    even = plan_for([make_loads(row=(100, 100, 100, 100))], shape, min_gain=0.2)
    assert "gain" in reason_to_keep(even, GroupState())
    few = plan_for([make_loads(row=(1, 1, 7, 1))], shape)
    assert "fewer than 32 tokens" in reason_to_keep(few, GroupState())


def test_a_map_is_not_written_while_engines_go_over_to_the_last(make_loads, make_map, shape):
    skewed = plan_for([make_loads(row=(10, 10, 700, 10))], shape)
    late = Applied(engine_id="late", version=3)
    state = GroupState(current=make_map(4), applied={"late": late})
    assert reason_to_keep(skewed, state) == "late still changes from version 3 to 4"
    refused = Applied(engine_id="late", version=3, rejected=Rejection(4, "no"))
    assert (
        reason_to_keep(skewed, GroupState(current=make_map(4), applied={"late": refused})) is None
    )


def test_groups_that_do_not_divide_are_an_error(make_loads):
    odd = ExpertShape(num_layers=2, num_experts=4, num_slots=7, num_ranks=2)
    with pytest.raises(PlacementShapeError):
        plan_for([], odd)
