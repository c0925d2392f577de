"""Each Triton kernel against its oracle on a real device: `make gpu`."""

import pytest
import torch

from kernels import dispatch
from kernels.interface import AttentionGroup

pytestmark = pytest.mark.gpu
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(scope="module")
def sets():
    assert torch.cuda.is_available(), "no CUDA device: make gpu needs one"
    torch.manual_seed(0)
    return dispatch.load("triton"), dispatch.load("reference")


def close(got, want) -> None:
    tolerance = 1e-4 if got.dtype == torch.float32 else 2e-2
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
def test_layers(sets, dtype):
    triton, reference = sets
    x = torch.randn(33, 576, device="cuda", dtype=dtype)
    weight = torch.randn(576, device="cuda", dtype=dtype)
    close(triton.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5))
    gate_up = torch.randn(33, 3072, device="cuda", dtype=dtype)
    close(triton.silu_mul(gate_up), reference.silu_mul(gate_up.clone()))
    angles = torch.randn(33, 32, device="cuda")
    cos_sin = torch.stack((angles.cos(), angles.sin()), -1)
    qk = torch.randn(33, 12, 64, device="cuda", dtype=dtype)
    expected = qk.clone()
    reference.rope(expected, cos_sin)
    triton.rope(qk, cos_sin)
    close(qk, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lengths", [[1], [33, 700, 64], [1500, 3]])
def test_attention(sets, dtype, lengths):
    triton, reference = sets
    width = -(-max(lengths) // 32)
    blocks = 1 + width * len(lengths)
    cache = torch.randn(blocks, 32, 6, 64, device="cuda", dtype=dtype)
    tables = torch.arange(1, blocks, device="cuda").view(len(lengths), width)
    group = AttentionGroup(
        rows=slice(0, len(lengths)),
        starts=tuple(length - 1 for length in lengths),
        block_tables=tables,
        mask=None,
        causal=False,
        lengths=torch.tensor(lengths, dtype=torch.int32, device="cuda"),
    )
    q = torch.randn(len(lengths), 9, 64, device="cuda", dtype=dtype)
    kv = torch.randn(len(lengths), 6, 64, device="cuda", dtype=dtype)
    slots = tables[:, 0] * 32
    expected = cache.clone()
    reference.kv_write(expected, kv, slots)
    triton.kv_write(cache, kv, slots)
    assert torch.equal(cache, expected)
    close(triton.attention(q, kv, cache, group), reference.attention(q, kv, cache, group))


def test_draw(sets):
    triton, reference = sets
    scores = torch.randn(8, 49152, device="cuda")
    keys = torch.randint(-(2**31), 2**31, (8, 2), device="cuda").int()
    assert torch.equal(triton.sample(scores, keys).cpu(), reference.sample(scores, keys).cpu())
