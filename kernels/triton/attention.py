"""Attention of one group: decodes run the paged Triton kernel, prefills PyTorch's attention."""

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
        # The kernel reads the whole history; PyTorch's attention applies the window by the mask.
        return TORCH.attention(q, kv, cache, group)
    return paged_decode_attention(
        q.contiguous(), cache, group.block_tables, group.lengths, max_length=longest
    )
