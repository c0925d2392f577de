"""Tensors by their published names, each checked and asked for once."""

from collections.abc import Mapping

import torch
from torch import Tensor

from services.engine.models.config import ModelFileError


class Taker:
    """Hands out tensors by name, checked, and knows which were never asked for."""

    def __init__(
        self, weights: Mapping[str, Tensor], dtype: torch.dtype, device: torch.device
    ) -> None:
        self._weights = dict(weights)
        self._dtype = dtype
        self._device = device

    def __call__(self, name: str, *shape: int) -> Tensor:
        """The tensor in the model's number format, on its device.

        Raises:
            ModelFileError: it is missing or has another shape.
        """
        tensor = checked(self._weights, name, *shape)
        del self._weights[name]
        return tensor.to(device=self._device, dtype=self._dtype)

    def optional(self, name: str, *shape: int, wanted: bool) -> Tensor | None:
        """The tensor if the model's configuration wants it.

        Raises:
            ModelFileError: it is wanted, and missing or of another shape.
        """
        return self(name, *shape) if wanted else None

    def ignore(self, *names: str) -> None:
        """These have their place elsewhere, or may be there and are not used."""
        for name in names:
            self._weights.pop(name, None)

    def finish(self) -> None:
        """Nothing must be left over.

        Raises:
            ModelFileError: naming tensors that no part of the model asked for.
        """
        left = [name for name in self._weights if not name.endswith("rotary_emb.inv_freq")]
        if left:
            raise ModelFileError(f"tensors without a place in the model: {', '.join(left[:5])}")


def add_bias(x: Tensor, bias: Tensor | None) -> Tensor:
    """x [T, N], with the bias [N] added in place if there is one."""
    return x if bias is None else x.add_(bias)


def checked(weights: Mapping[str, Tensor], name: str, *shape: int) -> Tensor:
    """The tensor as it was stored.

    Raises:
        ModelFileError: it is missing or has another shape.
    """
    tensor = weights.get(name)
    if tensor is None:
        raise ModelFileError(f"tensor {name!r} is missing")
    if tuple(tensor.shape) != shape:
        raise ModelFileError(f"tensor {name!r} has shape {tuple(tensor.shape)}, not {shape}")
    return tensor
