"""Norm, rotation, activation and products against their formulas."""

import pytest
import torch

from kernels.interface import Gate, Kernels

SHAPES = [(1, 1023), (3, 576), (33, 64), (7, 8)]
Case = tuple[Kernels, torch.dtype]
LIMITS = {torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}


def _close(got: torch.Tensor, want: torch.Tensor, dtype: torch.dtype, scale: float = 1) -> None:
    limit = LIMITS[dtype] * scale
    torch.testing.assert_close(got.float(), want.float(), atol=limit, rtol=limit)


@pytest.mark.parametrize("shape", SHAPES)
def test_rms_norm(case: Case, reference: Kernels, shape: tuple[int, int]) -> None:
    kernels, dtype = case
    x, weight = torch.randn(shape, dtype=dtype) * 3, torch.randn(shape[1], dtype=dtype)
    want = reference.rms_norm(x.float(), weight.float(), 1e-5)
    _close(kernels.rms_norm(x, weight, 1e-5), want, dtype, scale=4)


def test_a_float32_weight_multiplies_before_the_result_is_rounded(
    case: Case, reference: Kernels
) -> None:
    """Of 16 bits, a weight of 1 + 2 ** -10 would lose what differs from 1."""
    kernels, dtype = case
    x, weight = torch.randn(9, 200, dtype=dtype) * 3, 1 + torch.rand(200) / 1024
    want = reference.rms_norm(x.float(), weight, 1e-5)
    for got in (kernels.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5)):
        assert got.dtype == dtype
        rounding = torch.finfo(dtype).eps / 2 + 1e-6  # one rounding, and float32's own
        assert ((got.float() - want).abs() <= rounding * want.abs()).all()


@pytest.mark.parametrize("rows", [1, 5, 40])
def test_rope_rotates_a_view_in_place(case: Case, reference: Kernels, rows: int) -> None:
    """Only the part that was given changes: values beside it stay."""
    kernels, dtype = case
    whole = torch.randn(rows, 7, 16, dtype=dtype)
    angles = torch.rand(rows, 8) * 9
    cos_sin = torch.stack((angles.cos(), angles.sin()), dim=-1)
    want = whole.clone()
    reference.rope(want[:, :5], cos_sin)
    got = whole.clone()
    kernels.rope(got[:, :5], cos_sin)
    _close(got, want, dtype)
    assert torch.equal(got[:, 5:], whole[:, 5:])
    assert not torch.equal(got[:, :5], whole[:, :5])


def test_rope_keeps_lengths_and_adds_angles(kernels: Kernels) -> None:
    """Scores depend on distance alone: q at 3 with k at 1 as q at 12 with k at 10."""
    q, k = torch.randn(2, 1, 1, 32)

    def turned(x: torch.Tensor, position: int) -> torch.Tensor:
        angles = position * torch.logspace(0, -3, 16).unsqueeze(0)
        copy = x.clone()
        kernels.rope(copy, torch.stack((angles.cos(), angles.sin()), dim=-1))
        return copy.flatten()

    near, far = turned(q, 3) @ turned(k, 1), turned(q, 12) @ turned(k, 10)
    torch.testing.assert_close(near, far, atol=1e-4, rtol=1e-4)


GATES = [
    Gate("gelu_tanh"),
    Gate(alpha=1.702, limit=1.5, up_offset=1.0),
    Gate(limit=0.7),
]


@pytest.mark.parametrize("gate", GATES, ids=str)
@pytest.mark.parametrize("shape", [(0, 6), (1, 6), (33, 130)])
def test_gate_mul(case: Case, reference: Kernels, gate: Gate, shape: tuple[int, int]) -> None:
    kernels, dtype = case
    gate_up = (torch.randn(shape) * 2).to(dtype)
    want = reference.gate_mul(gate_up.float(), gate)
    _close(kernels.gate_mul(gate_up.clone(), gate), want, dtype, scale=4)


def test_gates_of_a_row_do_not_depend_on_other_rows(kernels: Kernels) -> None:
    gate_up = torch.randn(50, 2 * 23)
    for gate in GATES:
        together = kernels.gate_mul(gate_up, gate)
        for row in range(50):
            assert torch.equal(kernels.gate_mul(gate_up[row : row + 1], gate)[0], together[row])


@pytest.mark.parametrize("shape", [(1, 6), (9, 1024), (33, 130)])
def test_silu_mul(case: Case, reference: Kernels, shape: tuple[int, int]) -> None:
    kernels, dtype = case
    gate_up = torch.randn(shape, dtype=dtype)
    want = reference.silu_mul(gate_up.float())
    _close(kernels.silu_mul(gate_up.clone()), want, dtype)


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 31, 32, 33, 100])
def test_linear(case: Case, reference: Kernels, rows: int) -> None:
    kernels, dtype = case
    weight, x = torch.randn(70, 96, dtype=dtype) / 10, torch.randn(rows, 96, dtype=dtype)
    packed = kernels.pack(weight)
    want = reference.pack(weight.float())(x.float())
    got = packed(x)
    assert got.shape == (rows, 70)
    _close(got, want, dtype)
    residual = torch.randn(rows, 70, dtype=dtype)
    added = residual.clone()
    packed.add_to(added, x)
    _close(added, want + residual.float(), dtype)
    assert packed.nbytes == weight.nbytes
