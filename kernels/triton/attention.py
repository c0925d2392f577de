"""Attention of one group: paged decode in Triton, prefill through torch."""

from torch import Tensor

from kernels.interface import AttentionGroup
from kernels.torch import KERNELS as TORCH
from kernels.triton.paged_attention import paged_decode_attention


def attention(q: Tensor, kv: Tensor, cache: Tensor, group: AttentionGroup) -> Tensor:
    """See kernels.interface.Kernels.attention."""
    if q.shape[0] != len(group.starts) or group.lengths is None:
        return TORCH.attention(q, kv, cache, group)
    longest = max(group.starts) + 1
    if group.window and longest > group.window:
        # The kernel reads a whole history: torch's attention takes the window from the mask.
        return TORCH.attention(q, kv, cache, group)
    return paged_decode_attention(
        q.contiguous(), cache, group.block_tables, group.lengths, max_length=longest
    )
