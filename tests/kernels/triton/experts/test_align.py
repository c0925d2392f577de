"""The sort of chosen rows by expert beside Python's, and replicas beside their definition."""

import pytest
import torch

from kernels import reference
from kernels.triton.experts.align import GROUP_TILES, align, assign_slots
from services.engine.compute.expert_parallel.slot_map import TILE_ROWS, SlotMap

CASES = {
    "random": torch.randint(0, 7, (70, 3), generator=torch.Generator().manual_seed(1)),
    "one expert gets all": torch.full((45, 2), 3),
    "one row": torch.tensor([[6, 0]]),
    "some have none": torch.tensor([[-1, 2], [2, -1], [-1, -1], [5, 99]]),
    "all have none": torch.full((3, 2), -1),
    "no rows": torch.empty(0, 2, dtype=torch.long).fill_(0),
}
EXPERTS = 7


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("rows", [4, 16])
def test_every_chosen_row_is_in_one_tile_of_its_expert(name, rows):
    ids, loads = CASES[name], torch.full((EXPERTS,), 10)
    aligned = align(ids, EXPERTS, rows, loads)
    flat = ids.flatten().tolist()
    wanted = [[at for at, own in enumerate(flat) if own == expert] for expert in range(EXPERTS)]
    assert loads.tolist() == [10 + len(own) for own in wanted] or not flat
    assert len(aligned.tile_experts) % GROUP_TILES == 0
    found = [[] for _ in range(EXPERTS)]
    for expert, begin in zip(
        aligned.tile_experts.tolist(), aligned.tile_begins.tolist(), strict=True
    ):
        if expert >= 0:
            end = int(aligned.begins[expert] + aligned.counts[expert])
            own = aligned.order[begin : min(begin + rows, end)].tolist()
            assert own  # no tile is empty
            found[expert] += own
    assert found == wanted  # in the order of rows


@pytest.mark.parametrize("experts", [1, 15, 16, 130])
def test_any_number_of_experts(experts):
    ids = torch.arange(experts).repeat(2).view(-1, 1)
    aligned = align(ids, experts, 16)
    used = [expert for expert in aligned.tile_experts.tolist() if expert >= 0]
    assert used == list(range(experts))
    assert aligned.order.view(-1, 2).tolist() == [[at, at + experts] for at in range(experts)]


@pytest.mark.parametrize("first", [0, 5])
def test_replicas_take_whole_tiles_in_turn(first):
    slots = torch.tensor([[0, 9, 8], [1, 0, 0], [2, 7, 0], [3, 0, 0]])
    copies = torch.tensor([3, 1, 2, 1])
    ids = torch.randint(-1, 4, (60, 3), generator=torch.Generator().manual_seed(first))
    want = reference.KERNELS.experts.assign_slots(ids, slots, copies, first, 4)
    assert torch.equal(assign_slots(ids, slots, copies, first, 4), want)


def test_replicas_are_those_of_the_host():
    """The other ranks' map (`SlotMap`) sends the same rows to the same slots."""
    phy2log = (0, 1, 2, 0, 1, 0)
    ids = torch.randint(0, 3, (190, 2), generator=torch.Generator().manual_seed(2))
    sent = SlotMap(phy2log, 3, torch.device("cpu")).dispatch(ids, first_replica=1)
    slots = torch.tensor([[0, 3, 5], [1, 4, 0], [2, 0, 0]])
    got = assign_slots(ids, slots, torch.tensor([3, 2, 1]), 1, TILE_ROWS)
    assert torch.bincount(got.flatten(), minlength=6).tolist() == sent.per_slot.tolist()
    assert torch.equal(got.flatten().argsort(stable=True), sent.order)


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="ids must be contiguous int64"):
        align(torch.zeros(2, 2, dtype=torch.int32), 4, 16)
    with pytest.raises(ValueError, match=r"numbers per expert must be contiguous int64 \[4\]"):
        align(torch.zeros(2, 2, dtype=torch.long), 4, 16, torch.zeros(5, dtype=torch.long))
    ids = torch.zeros(2, 2, dtype=torch.long)
    with pytest.raises(ValueError, match="slots must be int64"):
        assign_slots(ids, torch.zeros(3, 1), torch.ones(3, dtype=torch.long), 0, 4)
