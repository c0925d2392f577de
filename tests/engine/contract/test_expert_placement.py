"""Which maps are refused and why; what a rank must load to go from one map to the next."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.engine.contract.expert_placement import (
    check_placement,
    first_placement,
    missing_experts,
    rank_experts,
)
from services.engine.contract.runner import ExpertPlacement, ExpertShape, PlacementRefusedError

SHAPE = ExpertShape(num_layers=2, num_experts=3, num_slots=4, num_ranks=2)
GOOD = ExpertPlacement(1, ((0, 1, 2, 1), (2, 2, 1, 0)), "r")


def test_a_map_that_fits_is_taken() -> None:
    check_placement(GOOD, SHAPE, "r")


@pytest.mark.parametrize(
    ("placement", "message"),
    [
        (replace(GOOD, version=0), "version 0 is below 1"),
        (replace(GOOD, model_revision="x"), "for model revision 'x', not 'r'"),
        (replace(GOOD, phy2log=GOOD.phy2log[:1]), "has 1 layers, the model has 2"),
        (replace(GOOD, phy2log=((0, 1, 2, 1), (0, 1, 2))), "layer 1 has 3 slots, .* has 4"),
        (replace(GOOD, phy2log=((0, 1, 2, 3), (0, 1, 2, 0))), "layer 0, slot 3: .* no expert 3"),
        (replace(GOOD, phy2log=((0, 1, 2, -1), (0, 1, 2, 0))), "layer 0, slot 3: .* expert -1"),
        (replace(GOOD, phy2log=((0, 1, 2, 0), (0, 1, 1, 0))), "layer 1: expert 2 has no slot"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_map_that_does_not_fit_is_refused(placement: ExpertPlacement, message: str) -> None:
    with pytest.raises(PlacementRefusedError, match=message):
        check_placement(placement, SHAPE, "r")


def test_a_dense_model_takes_no_map() -> None:
    with pytest.raises(PlacementRefusedError, match="has no experts"):
        check_placement(GOOD, None, "r")


def test_the_first_map_gives_every_expert_a_slot() -> None:
    first = first_placement(SHAPE, "r")
    assert first.phy2log == ((0, 1, 2, 0), (0, 1, 2, 0))
    check_placement(replace(first, version=1), SHAPE, "r")


def test_a_rank_loads_what_it_lacks_and_nothing_else() -> None:
    first = first_placement(SHAPE, "r")
    assert rank_experts(GOOD, SHAPE, 1) == ((2, 1), (1, 0))
    assert missing_experts(first, GOOD, SHAPE, 0) == ((1, 2),)
    assert missing_experts(first, GOOD, SHAPE, 1) == ((0, 1), (1, 1))


@st.composite
def _maps(draw: st.DrawFn) -> tuple[tuple[int, ...], ...]:
    rows = []
    for _ in range(SHAPE.num_layers):
        extra = draw(st.integers(0, SHAPE.num_experts - 1))
        rows.append(tuple(draw(st.permutations([0, 1, 2, extra]))))
    return tuple(rows)


@given(old=_maps(), new=_maps())
def test_what_is_held_and_what_is_loaded_is_what_is_wanted(old, new) -> None:
    before, after = ExpertPlacement(1, old, "r"), ExpertPlacement(2, new, "r")
    for rank in range(2):
        loaded = missing_experts(before, after, SHAPE, rank)
        held = rank_experts(before, SHAPE, rank)
        for layer, wanted in enumerate(rank_experts(after, SHAPE, rank)):
            own = {expert for at, expert in loaded if at == layer}
            assert not own & set(held[layer])
            assert set(wanted) <= own | set(held[layer])
            assert own <= set(wanted)
