"""Refuses tensors that a kernel would misread, before it is launched."""

from collections.abc import Sequence

import torch
from torch import Tensor

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def check(
    operation: str,
    name: str,
    tensor: Tensor,
    shape: Sequence[int | None],
    dtypes: Sequence[torch.dtype],
    device: torch.device,
    *,
    adjacent_only: bool = False,
) -> None:
    """Refuse a tensor whose shape, format, device or strides a kernel does not expect.

    Args:
        operation: named in the message.
        name: of the argument, named in the message.
        shape: expected sizes; None stands for any.
        dtypes: formats that the kernel reads.
        device: where the other arguments are.
        adjacent_only: only the elements of the last axis must follow one another; otherwise the
            whole tensor must be contiguous.

    Raises:
        ValueError: one of them does not fit.
    """
    at = f"{operation}: {name}"
    if tensor.dim() != len(shape) or any(
        want is not None and want != got for want, got in zip(shape, tensor.shape, strict=True)
    ):
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        raise ValueError(f"{at} has shape {list(tensor.shape)}, it must be [{wanted}]")
    if tensor.dtype not in dtypes:
        known = ", ".join(str(dtype) for dtype in dtypes)
        raise ValueError(f"{at} is {tensor.dtype}, it must be one of: {known}")
    if tensor.device != device:
        raise ValueError(f"{at} is on {tensor.device}, it must be on {device} like the others")
    if adjacent_only:
        if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
            raise ValueError(f"{at} has elements {tensor.stride(-1)} apart, they must be adjacent")
    elif not tensor.is_contiguous():
        raise ValueError(f"{at} has strides {list(tensor.stride())}, it must be contiguous")
