import pytest
import torch

from kernels.reference.sample import sample as oracle
from kernels.torch.sample import gumbel
from kernels.triton import sample as module
from kernels.triton.sample import sample


def keys_for(rows: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rows)
    return torch.randint(-(2**31), 2**31, (rows, 2), generator=generator, dtype=torch.int64).int()


@pytest.mark.parametrize(("rows", "size"), [(1, 10), (6, 1500), (3, 1024), (0, 8)])
def test_draws_what_the_oracle_draws(rows, size):
    torch.manual_seed(1)
    scores, keys = torch.randn(rows, size), keys_for(rows)
    assert torch.equal(sample(scores, keys), oracle(scores, keys).long())


def test_a_forbidden_id_is_never_drawn_and_rows_do_not_matter():
    scores, keys = torch.zeros(200, 64), keys_for(200)
    scores[:, ::2] = float("-inf")
    drawn = sample(scores, keys)
    assert (drawn % 2 == 1).all()
    assert torch.equal(drawn[50:60], sample(scores[50:60], keys[50:60].contiguous()))


def test_ties_go_to_the_lowest_id_across_tiles(monkeypatch):
    monkeypatch.setattr(module, "TILE", 16)
    scores, keys = torch.full((2, 64), float("-inf")), keys_for(2)
    noise = gumbel(keys, 64)
    for row in range(2):
        for index in (7, 40):
            scores[row, index] = 5.0 - noise[row, index]
    drawn = sample(scores, keys)
    assert set(drawn.tolist()) <= {7, 40}
    scores[:] = float("-inf")
    assert sample(scores, keys).tolist() == [0, 0]
