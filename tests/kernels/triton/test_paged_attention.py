import pytest
import torch

from kernels import reference
from kernels.interface import AttentionGroup
from kernels.triton import paged_attention
from kernels.triton.paged_attention import paged_decode_attention


def case(lengths, heads, kv_heads, dim, block, dtype):
    torch.manual_seed(5)
    width = -(-max(lengths) // block)
    blocks = 1 + width * len(lengths)
    cache = torch.randn(blocks, block, 2 * kv_heads, dim).to(dtype)
    tables = (torch.randperm(blocks - 1) + 1)[: width * len(lengths)].view(len(lengths), width)
    q = torch.randn(len(lengths), heads, dim).to(dtype)
    return q, cache, tables.contiguous(), torch.tensor(lengths, dtype=torch.int32)


def oracle(q, cache, tables, lengths):
    starts = tuple(int(n) - 1 for n in lengths)
    group = AttentionGroup(slice(0, len(starts)), starts, tables, None, False)
    kv = torch.empty(len(starts), cache.shape[2], cache.shape[3])
    return reference.KERNELS.attention(q, kv, cache, group)


@pytest.mark.parametrize(
    ("lengths", "heads", "kv_heads", "dim", "block"),
    [
        ([1], 9, 3, 64, 32),
        ([33, 7, 64], 9, 3, 64, 32),
        ([20, 3], 4, 4, 16, 8),
        ([50], 8, 1, 80, 16),
    ],
)
# The interpreter has no product in bfloat16; that one is compiled and run by `make gpu`.
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_equal_to_the_definition(lengths, heads, kv_heads, dim, block, dtype):
    q, cache, tables, count = case(lengths, heads, kv_heads, dim, block, dtype)
    out = paged_decode_attention(q, cache, tables, count, max_length=max(lengths))
    tolerance = 2e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(out, oracle(q, cache, tables, count), rtol=tolerance, atol=tolerance)


def test_several_splits_are_joined(monkeypatch):
    monkeypatch.setattr(paged_attention, "SPLIT", 64)
    q, cache, tables, count = case([150, 64, 65], 4, 2, 16, 16, torch.float32)
    out = paged_decode_attention(q, cache, tables, count, max_length=150)
    torch.testing.assert_close(out, oracle(q, cache, tables, count), rtol=2e-5, atol=2e-5)


def test_a_sequence_gives_the_same_bits_alone_and_in_a_batch(monkeypatch):
    monkeypatch.setattr(paged_attention, "SPLIT", 64)
    q, cache, tables, count = case([150, 30], 4, 2, 16, 16, torch.float32)
    together = paged_decode_attention(q, cache, tables, count, max_length=150)
    alone = paged_decode_attention(
        q[1:].contiguous(), cache, tables[1:].contiguous(), count[1:].contiguous(), max_length=30
    )
    assert torch.equal(together[1:], alone)
