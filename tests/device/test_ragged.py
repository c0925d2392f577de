"""Attention of ragged batches on a real device, beside the oracle: `make gpu`."""

from dataclasses import fields, replace

import pytest
import torch

from kernels.reference import ragged as oracle
from kernels.reference import v4
from kernels.triton.ragged.attention import attention
from kernels.triton.ragged.latent_attention import latent_attention
from kernels.triton.v4 import streams
from tests.kernels.triton.ragged.cases import bound, make_batch, make_cache, used_slots

pytestmark = pytest.mark.gpu
PARTS = [(0, 1), (699, 1), (1499, 1), (0, 70), (600, 33), (511, 2)]
BLOCK = 32


@pytest.fixture(autouse=True)
def _seeded():
    assert torch.cuda.is_available(), "no CUDA device: make gpu needs one"
    torch.manual_seed(0)


def moved(record, device):
    """A record with its tensors on a device."""
    values = {field.name: getattr(record, field.name) for field in fields(record)}
    tensors = {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}
    return replace(record, **{name: value.to(device) for name, value in tensors.items()})


def case(inner, dtype):
    batch, blocks = make_batch(PARTS, BLOCK, decodes=3)
    cache = make_cache(blocks, BLOCK, inner, used_slots(batch, BLOCK), dtype)
    return cache, batch, int(batch.query_starts[-1])


def check(got, want, limit):
    assert (got.cpu().float() - want.float()).abs().max() <= limit


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("options", [{}, {"window": 128, "sinks": True}, {"soft_cap": 30.0}])
def test_paged_attention(options, dtype):
    cache, batch, rows = case((4, 128), dtype)
    q = torch.randn(rows, 8, 128).to(dtype)
    if "sinks" in options:
        options = options | {"sinks": torch.randn(8)}
    want = oracle.attention(q, cache, batch, scale=None, **options)
    there = {k: v.cuda() if isinstance(v, torch.Tensor) else v for k, v in options.items()}
    got = attention(q.cuda(), cache.cuda(), moved(batch, "cuda"), scale=None, **there)
    # exp on a device is right to 2 units of float32, so the bound for exact ones is doubled.
    check(got, want, 2 * bound(q, cache[:, :, :2], cache[:, :, 2:], 128**-0.5, extra=30 * 2.0**-21))


def test_latent_attention():
    cache, batch, rows = case((576,), torch.bfloat16)
    q = torch.randn(rows, 16, 576).bfloat16()
    want = oracle.latent_attention(q, cache, batch, rank=512, scale=0.05)
    there = moved(batch, "cuda")
    got = latent_attention(q.cuda(), cache.cuda(), there, rank=512, scale=0.05)
    check(got, want, 2 * bound(q, cache, cache[..., :512], 0.05))


def test_a_row_has_the_same_bits_decoded_and_in_a_prompt():
    batch, blocks = make_batch([(0, 1300)], BLOCK)
    cache = make_cache(blocks, BLOCK, (4, 128), used_slots(batch, BLOCK), torch.bfloat16).cuda()
    latents = make_cache(blocks, BLOCK, (576,), used_slots(batch, BLOCK), torch.bfloat16).cuda()
    there = moved(batch, "cuda")
    q = torch.randn(1300, 16, 128, device="cuda").bfloat16()
    turned = torch.randn(1300, 8, 576, device="cuda").bfloat16()
    whole = attention(q, cache, there, scale=None)
    mixed = latent_attention(turned, latents, there, rank=512, scale=0.05)
    for position in (0, 511, 512, 1299):
        one = slice(position, position + 1)
        alone = replace(
            there,
            query_starts=torch.tensor([0, 1], device="cuda").int(),
            lengths=torch.tensor([position + 1], device="cuda").int(),
            num_decodes=1,
        )
        assert torch.equal(attention(q[one], cache, alone, scale=None), whole[one])
        got = latent_attention(turned[one], latents, alone, rank=512, scale=0.05)
        assert torch.equal(got, mixed[one])


def test_streams_of_deepseek_v4():
    state = torch.randn(5, 4, 512)
    args = (state, torch.randn(24, 2048) / 45, torch.randn(24), torch.rand(24))
    options = {"norm_eps": 1e-6, "eps": 1e-6, "steps": 20}
    want = v4.connect(*args, **options)
    got = streams.connect(*(tensor.cuda() for tensor in args), **options)
    for mine, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(mine.cpu(), theirs, atol=2e-4, rtol=2e-4)
