"""Norm, rotation and storage of a round's heads, one after another."""

from torch import Tensor

from kernels.reference.attention import kv_write
from kernels.reference.layers import rms_norm, rope


def place_heads(
    qkv: Tensor,
    norms: tuple[Tensor, Tensor] | None,
    eps: float,
    cos_sin: Tensor,
    cache: Tensor,
    slots: Tensor,
) -> None:
    """See kernels.interface.Kernels.place_heads."""
    values = qkv.shape[1] - cache.shape[2] // 2
    heads = qkv.shape[1] - cache.shape[2]
    if norms is not None:
        for part, norm in ((qkv[:, :heads], norms[0]), (qkv[:, heads:values], norms[1])):
            part.copy_(rms_norm(part, norm, eps))
    rope(qkv[:, :values], cos_sin)
    kv_write(cache, qkv[:, heads:], slots)
