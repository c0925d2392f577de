"""The draw's noise: equal to plain integers, and spread like Gumbel noise."""

import math

import pytest
import torch

from kernels.interface import Kernels
from kernels.reference.sample import noise
from kernels.torch.sample import arg_max, gumbel


@pytest.mark.parametrize("key", [(0, 0), (1, -1), (-(2**31), 2**31 - 1), (123456789, -987654321)])
def test_noise_equals_plain_integers(key: tuple[int, int]) -> None:
    got = gumbel(torch.tensor([key], dtype=torch.int32), 2000)[0].tolist()
    want = [noise(*key, index) for index in range(2000)]
    assert got == pytest.approx(want, rel=1e-4, abs=1e-4)


def test_noise_is_gumbel() -> None:
    """Mean is Euler's constant and variance pi^2 / 6; the share below 0 is 1 / e."""
    keys = torch.arange(64, dtype=torch.int32).view(32, 2)
    values = gumbel(keys, 8192).double().flatten()
    assert values.isfinite().all()
    assert values.mean().item() == pytest.approx(0.57722, abs=0.01)
    assert values.var().item() == pytest.approx(math.pi**2 / 6, abs=0.03)
    assert (values < 0).double().mean().item() == pytest.approx(1 / math.e, abs=0.004)


def test_rows_and_ids_are_uncorrelated() -> None:
    keys = torch.arange(32, dtype=torch.int32).view(16, 2)
    values = gumbel(keys, 4096).double()
    table = torch.corrcoef(values) - torch.eye(16)
    assert table.abs().max() < 0.08
    shifted = torch.stack((values[:, :-1].flatten(), values[:, 1:].flatten()))
    assert abs(torch.corrcoef(shifted)[0, 1].item()) < 0.02


def test_sets_draw_the_same_tokens(kernels: Kernels, reference: Kernels) -> None:
    scores = torch.randn(8, 300) * 2
    scores[3, 10:] = float("-inf")
    keys = torch.randint(-(2**31), 2**31, (8, 2)).to(torch.int32)
    assert kernels.sample(scores, keys).tolist() == reference.sample(scores, keys).tolist()


def test_a_lone_candidate_is_always_drawn(kernels: Kernels) -> None:
    scores = torch.full((64, 50), float("-inf"))
    scores[:, 17] = -3.0
    keys = torch.randint(-(2**31), 2**31, (64, 2)).to(torch.int32)
    assert kernels.sample(scores, keys).tolist() == [17] * 64


def test_the_arg_max_is_the_lowest_of_equals_and_shows_what_is_not_a_number() -> None:
    scores = torch.zeros(4, 100)
    scores[1, 40] = scores[1, 90] = 2.0
    scores[2, 60] = float("nan")
    scores[3] = float("-inf")
    assert arg_max(scores).tolist() == [0, 40, 60, 0]
    assert arg_max(torch.empty(0, 5)).tolist() == []
