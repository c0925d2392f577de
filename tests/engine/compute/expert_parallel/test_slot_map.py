"""Every row reaches exactly one replica of its expert, and tiles do not depend on the map."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from services.engine.compute.expert_parallel.slot_map import TILE_ROWS, SlotMap

CPU = torch.device("cpu")
MAPS = [(0, 1, 2, 3), (3, 1, 0, 2, 3, 3), (1, 1, 0, 2, 1, 3, 2, 0)]


def _tiles(row_map: tuple[int, ...], ids: torch.Tensor, turn: int) -> list[tuple]:
    """(expert, choices computed together) over all slots, and checks of each slot."""
    got = SlotMap(row_map, 4, CPU).dispatch(ids, turn)
    flat = ids.flatten()
    tiles, at = [], 0
    for slot, count in enumerate(got.per_slot.tolist()):
        own = got.order[at : at + count].tolist()
        at += count
        assert own == sorted(own)
        for first in range(0, count, TILE_ROWS):
            part = own[first : first + TILE_ROWS]
            assert {int(flat[i]) for i in part} == {row_map[slot]}
            tiles.append((row_map[slot], tuple(part)))
    assert at == len(got.order)
    return sorted(tiles)


@given(
    rows=st.integers(0, 300),
    top_k=st.integers(1, 2),
    kinds=st.sampled_from([(0,), (0, 3), (-1, 0, 1, 2, 3), (-1,)]),
    turn=st.integers(0, 5),
    seed=st.integers(0, 99),
)
def test_all_maps_compute_the_same_tiles(rows, top_k, kinds, turn, seed) -> None:
    picks = torch.randint(len(kinds), (rows, top_k), generator=torch.Generator().manual_seed(seed))
    ids = torch.tensor(kinds)[picks]
    want = _tiles(MAPS[0], ids, 0)
    assert (
        sorted(i for _, part in want for i in part) == (ids.flatten() >= 0).nonzero()[:, 0].tolist()
    )
    for row_map in MAPS[1:]:
        assert _tiles(row_map, ids, turn) == want


def test_replicas_take_turns_by_tiles_and_by_rounds() -> None:
    ids = torch.full((5 * TILE_ROWS, 1), 1)
    row_map = SlotMap((0, 1, 1, 2, 3), 4, CPU)
    assert row_map.dispatch(ids, 0).per_slot.tolist() == [0, 3 * TILE_ROWS, 2 * TILE_ROWS, 0, 0]
    assert row_map.dispatch(ids, 1).per_slot.tolist() == [0, 2 * TILE_ROWS, 3 * TILE_ROWS, 0, 0]
    assert row_map.dispatch(ids[:3], 1).per_slot.tolist() == [0, 0, 3, 0, 0]
