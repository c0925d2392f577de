"""int8 products against their definition, row by row; unsuitable machines are refused."""

import itertools

import pytest
import torch

from kernels import dispatch
from kernels.interface import UnsupportedError
from kernels.torch.int8 import linear, probe
from tests.marks import needs_vnni


def _by_definition(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Round to the nearest of 127 steps on each side, add up as integers, scale."""
    across = weight.abs().amax(1, keepdim=True) / 127
    along = (x.abs().amax(1, keepdim=True) / 127).clamp_min(1e-30)
    sums = torch.round(x / along).long() @ torch.round(weight / across).long().T
    return sums.double() * across.T.double() * along.double()


@needs_vnni
@pytest.mark.parametrize("rows", [0, 1, 3, 17, 130])
@pytest.mark.parametrize("shape", [(96, 64), (33, 100), (576, 1536)])
def test_a_product_matches_its_definition(rows: int, shape: tuple[int, int]) -> None:
    x, weight = torch.randn(rows, shape[1]) * 5, torch.randn(shape)
    packed = dispatch.load("torch-int8").pack(weight)
    got, want = packed(x), _by_definition(x, weight)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), want, atol=1e-3, rtol=1e-4)
    assert (got - x @ weight.T).norm() <= 0.02 * (x @ weight.T).norm()
    residual = torch.randn(rows, shape[0])
    added = residual.clone()
    packed.add_to(added, x)
    torch.testing.assert_close(added, residual + got)
    assert packed.nbytes == weight.nbytes // 4 + shape[0] * 4


@needs_vnni
def test_a_row_does_not_depend_on_others() -> None:
    packed = dispatch.load("torch-int8").pack(torch.randn(192, 576))
    x = torch.randn(70, 576) * torch.logspace(-3, 3, 70).unsqueeze(1)
    together = packed(x)
    for part in (1, 2, 7, 16, 33):
        alone = torch.cat([packed(rows) for rows in x.split(part)])
        assert torch.equal(together, alone), part


@needs_vnni
def test_the_largest_values_do_not_overflow() -> None:
    packed = dispatch.load("torch-int8").pack(torch.ones(64, 4096))
    torch.testing.assert_close(packed(torch.ones(5, 4096)), torch.full((5, 64), 4096.0))
    torch.testing.assert_close(packed(-torch.ones(5, 4096)), torch.full((5, 64), -4096.0))


@needs_vnni
def test_zeros_stay_zeros_and_values_that_are_not_finite_stay_so() -> None:
    weight = torch.randn(48, 64)
    weight[3] = 0
    packed = dispatch.load("torch-int8").pack(weight)
    x = torch.randn(4, 64)
    x[1] = 0
    x[2, 5] = float("nan")
    x[3, 5] = float("inf")
    out = packed(x)
    assert out[0].isfinite().all()
    assert torch.equal(out[1], torch.zeros(48))
    assert out[0, 3] == 0
    assert out[2].isnan().all()
    assert not out[3].isfinite().any()


def test_rows_are_rounded_to_the_nearest_step() -> None:
    x = torch.tensor([[127.0, 0.4, 0.6, -0.4, -0.6, -127.0]])
    quantized, scales = linear.quantize_rows(x)
    assert (quantized.int() - 128).tolist() == [[127, 0, 1, 0, -1, -127]]
    assert scales.tolist() == [[1.0]]


def test_a_machine_whose_product_overflows_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    exact = probe.integer_product
    monkeypatch.setattr(probe, "integer_product", lambda *args: exact(*args).clamp(max=1e4))
    with pytest.raises(UnsupportedError, match=r"dtype=int8.*overflows"):
        probe.require_integer_product()


@needs_vnni
def test_a_machine_that_multiplies_by_plain_loops_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    times = itertools.cycle([1.0, 0.01])
    monkeypatch.setattr(probe, "_best", lambda work: next(times))
    with pytest.raises(UnsupportedError, match=r"dtype=int8.*100 times"):
        probe.require_integer_product()


@needs_vnni
def test_a_busy_moment_is_not_mistaken_for_plain_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([1.0, 0.01, 1.0, 0.9] + [1.0, 0.01] * 3)
    monkeypatch.setattr(probe, "_best", lambda work: next(times))
    probe.require_integer_product()


def test_a_torch_without_the_product_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(weight: torch.Tensor) -> torch.Tensor:
        raise AttributeError("no such operator")

    monkeypatch.setattr(probe, "prepack", missing)
    with pytest.raises(UnsupportedError, match=r"dtype=int8.*no such operator"):
        probe.require_integer_product()


def test_which_options_choose_int8() -> None:
    assert dispatch.choose("cpu", dtype="int8") == "torch-int8"
    with pytest.raises(UnsupportedError, match="dtype=int8"):
        dispatch.choose("cuda", dtype="int8")
    with pytest.raises(UnsupportedError, match="deterministic"):
        dispatch.choose("cpu", dtype="int8", deterministic=True)
