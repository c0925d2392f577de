"""Gumbel-max over noise that is a hash of (row key, token id): 32-bit integers, then two logs."""

import torch
from torch import Tensor

_GOLDEN = 0x9E3779B9 - (1 << 32)
_FIRST, _SECOND = 0x21F0AAAD, 0xD35A2D97 - (1 << 32)
_BELOW_ONE = 1 - 2**-24


def sample(scores: Tensor, keys: Tensor) -> Tensor:
    """See kernels.interface.Kernels.sample.

    Row by row: the noise takes 20 passes, and those of one row stay in a core's cache. At 8 rows
    of 49,152 that is 10 times faster than all together.
    """
    count = scores.shape[1]
    drawn = [
        arg_max(gumbel(key, count).add_(row))
        for row, key in zip(torch.split(scores, 1), torch.split(keys, 1), strict=True)
    ]
    return torch.cat(drawn) if drawn else scores.new_empty(0, dtype=torch.long)


def arg_max(scores: Tensor) -> Tensor:
    """[rows] int64 of scores [rows, V]: the lowest id of the highest score, or of a NaN.

    numpy's takes a tenth of the time of torch's on a CPU.
    """
    if scores.device.type != "cpu":
        return scores.argmax(-1)
    return torch.from_numpy(scores.numpy().argmax(-1))


def gumbel(keys: Tensor, count: int) -> Tensor:
    """[rows, count] float32: -log(-log(1 - v)) with v in (0, 1), fine-grained near 0.

    Args:
        keys: [rows, 2] int32.
    """
    words = torch.arange(count, dtype=torch.int32, device=keys.device).mul_(_GOLDEN)
    words = _mix(words + keys[:, :1])
    words = _mix(words.bitwise_xor_(keys[:, 1:])).bitwise_and_(0x7FFFFFFF)
    v = words.float().add_(0.5).mul_(2.0**-31).clamp_(max=_BELOW_ONE)
    return v.neg_().log1p_().neg_().log_().neg_()


def _mix(x: Tensor) -> Tensor:
    """A 32-bit permutation, in place (constants: Wellons' hash-prospector, lowbias32 family)."""
    x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF)).mul_(_FIRST)
    x.bitwise_xor_((x >> 15).bitwise_and_(0x1FFFF)).mul_(_SECOND)
    return x.bitwise_xor_((x >> 15).bitwise_and_(0x1FFFF))
