"""Norm, rotation and storage of heads in one launch beside the three steps by definition."""

import pytest
import torch

from kernels import reference
from kernels.triton.place_heads import place_heads

# Two roundings to the format before the last one; a rotation adds two of them.
UNIT = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


def case(rows, heads, kv_heads, dim, dtype):
    torch.manual_seed(rows)
    qkv = torch.randn(rows, 2 * (heads + 2 * kv_heads), dim).to(dtype)[:, : heads + 2 * kv_heads]
    angles = torch.randn(rows, dim // 2)
    cos_sin = torch.stack((angles.cos(), angles.sin()), -1)
    cache = torch.randn(5, 8, 2 * kv_heads, dim).to(dtype)
    norms = torch.randn(dim).to(dtype), torch.randn(dim).to(dtype)
    return qkv, norms, cos_sin, cache, torch.randperm(40)[:rows]


@pytest.mark.parametrize("dtype", UNIT)
@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize(
    ("rows", "heads", "kv_heads", "dim"), [(3, 4, 2, 16), (1, 3, 1, 6), (0, 2, 2, 8)]
)
def test_equal_to_the_three_steps(rows, heads, kv_heads, dim, normed, dtype):
    qkv, norms, cos_sin, cache, slots = case(rows, heads, kv_heads, dim, dtype)
    used = norms if normed else None
    wide, exact = qkv.double(), cache.double()
    wide_norms = (norms[0].double(), norms[1].double()) if normed else None
    untouched = qkv[:, heads + kv_heads :].clone()
    reference.KERNELS.place_heads(wide, wide_norms, 1e-5, cos_sin.double(), exact, slots)
    place_heads(qkv, used, 1e-5, cos_sin, cache, slots)
    limit = 6 * UNIT[dtype] * (wide.abs().amax(-1, keepdim=True) + 1) * 2
    assert ((qkv.double() - wide).abs() <= limit).all()
    assert torch.equal(qkv[:, heads + kv_heads :], untouched)
    flat = cache.flatten(0, 1)
    assert torch.equal(flat[slots], qkv[:, heads:])
    others = torch.ones(40, dtype=torch.bool).index_fill(0, slots, False)
    assert torch.equal(flat[others].double(), exact.flatten(0, 1)[others])


def test_norms_in_float32_are_rounded_once():
    qkv, norms, cos_sin, cache, slots = case(3, 4, 2, 16, torch.bfloat16)
    wide_norms = norms[0].float() + 2**-9, norms[1].float() + 2**-9
    cos_sin[..., 0], cos_sin[..., 1] = 1.0, 0.0  # no rotation, so no rounding after the norms
    wanted = qkv.clone()
    reference.KERNELS.place_heads(wanted, wide_norms, 1e-5, cos_sin, cache.clone(), slots)
    place_heads(qkv, wide_norms, 1e-5, cos_sin, cache, slots)
    assert (qkv.float() - wanted.float()).abs().max() <= 2**-8 * wanted.abs().max()
    assert (qkv == wanted).float().mean() > 0.98


def test_what_does_not_fit_is_refused():
    qkv, norms, cos_sin, cache, slots = case(2, 2, 1, 8, torch.float32)
    with pytest.raises(ValueError, match=r"cos_sin must be float32 \(2, 4, 2\)"):
        place_heads(qkv, norms, 1e-5, cos_sin[:1], cache, slots)
    with pytest.raises(ValueError, match=r"norms must be torch\.float32 or float32 \[8\]"):
        place_heads(qkv, (norms[0], norms[1][:4]), 1e-5, cos_sin, cache, slots)
    with pytest.raises(ValueError, match="slots must be int64"):
        place_heads(qkv, norms, 1e-5, cos_sin, cache, slots.int())
    with pytest.raises(ValueError, match=r"cache must be contiguous torch\.float32"):
        place_heads(qkv, norms, 1e-5, cos_sin, cache.bfloat16(), slots)
