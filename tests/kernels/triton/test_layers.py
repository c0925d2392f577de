import pytest
import torch

from kernels import reference
from kernels.triton.kv_write import kv_write
from kernels.triton.rms_norm import rms_norm
from kernels.triton.rope import rope
from kernels.triton.silu_mul import silu_mul

ORACLE = reference.KERNELS
DTYPES = [torch.float32, torch.bfloat16]


def close(a: torch.Tensor, b: torch.Tensor) -> None:
    tolerance = 1e-5 if a.dtype == torch.float32 else 2e-2
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(3)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "size"), [(1, 576), (5, 64), (3, 100), (0, 64)])
def test_rms_norm(rows, size, dtype):
    x, weight = torch.randn(rows, 2 * size)[:, :size].to(dtype), torch.randn(size).to(dtype)
    close(rms_norm(x, weight, 1e-5), ORACLE.rms_norm(x, weight, 1e-5))


def test_a_float32_weight_multiplies_before_the_result_is_rounded():
    x, weight = torch.randn(5, 100).bfloat16(), 1 + torch.rand(100) / 1024
    got = rms_norm(x, weight, 1e-5)
    assert got.dtype == torch.bfloat16
    want = ORACLE.rms_norm(x.float(), weight, 1e-5)
    # One rounding; the interpreter's cuts off.
    assert ((got.float() - want).abs() <= (2**-7 + 1e-6) * want.abs()).all()


def test_rms_norm_of_heads_in_a_slice():
    x, weight = torch.randn(3, 9, 16)[:, 2:6], torch.randn(16)
    close(rms_norm(x, weight, 1e-5), ORACLE.rms_norm(x, weight, 1e-5))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "heads", "dim"), [(4, 12, 64), (1, 3, 6), (0, 3, 8)])
def test_rope_rotates_a_slice_in_place(rows, heads, dim, dtype):
    wide = torch.randn(rows, heads + 3, dim).to(dtype)
    angles = torch.randn(rows, dim // 2)
    cos_sin = torch.stack((angles.cos(), angles.sin()), -1)
    expected = wide.clone()
    ORACLE.rope(expected[:, :heads], cos_sin)
    rope(wide[:, :heads], cos_sin)
    close(wide, expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_kv_write_touches_its_slots_only(dtype):
    cache = torch.randn(6, 8, 6, 16).to(dtype)
    kv = torch.randn(5, 9, 16)[:, 3:].to(dtype)
    slots = torch.tensor([0, 47, 13, 8, 30])
    expected = cache.clone()
    ORACLE.kv_write(expected, kv, slots)
    kv_write(cache, kv, slots)
    assert torch.equal(cache, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "size"), [(2, 1536), (1, 40), (0, 8)])
def test_silu_mul(rows, size, dtype):
    gate_up = torch.randn(rows, 2 * size).to(dtype)
    close(silu_mul(gate_up), ORACLE.silu_mul(gate_up.clone()))


def test_shapes_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="rms_norm"):
        rms_norm(torch.zeros(2, 4), torch.zeros(5), 1e-5)
    with pytest.raises(ValueError, match="rope"):
        rope(torch.zeros(2, 3, 4), torch.zeros(2, 3, 2))
    with pytest.raises(ValueError, match="kv_write"):
        kv_write(torch.zeros(2, 4, 2, 4), torch.zeros(1, 4, 4), torch.zeros(1, dtype=torch.long))
    with pytest.raises(ValueError, match="silu_mul"):
        silu_mul(torch.zeros(2, 5))
