"""Tensors by their published names, each checked and asked for once."""

from abc import abstractmethod
from collections.abc import Mapping

import torch
from torch import Tensor

from services.engine.compute.models.rows import DenseRows, Rows
from services.engine.contract.model_config import ModelFileError


class StoredWeights(Mapping[str, Tensor]):
    """Tensors that stay in their file: each is decoded when it is asked for, and again each time.

    So a model's weights never exist twice: what is packed of one tensor is there before the next
    is read.
    """

    @abstractmethod
    def rows(self, name: str, dtype: torch.dtype) -> Rows:
        """A table in the file's own blocks; KeyError as for a mapping."""


class Taker:
    """Hands out tensors by name, checked, and knows which were never asked for."""

    def __init__(
        self, weights: Mapping[str, Tensor], dtype: torch.dtype, device: torch.device
    ) -> None:
        self._weights = weights
        self._left = set(weights)
        self._dtype = dtype
        self._device = device

    def __call__(self, name: str, *shape: int) -> Tensor:
        """The tensor in the model's number format, on its device.

        Raises:
            ModelFileError: it is missing or has another shape.
        """
        tensor = checked(self._weights, name, *shape)
        self._left.discard(name)
        return tensor.to(device=self._device, dtype=self._dtype)

    def optional(self, name: str, *shape: int, wanted: bool) -> Tensor | None:
        """The tensor if the model's configuration wants it.

        Raises:
            ModelFileError: it is wanted, and missing or of another shape.
        """
        return self(name, *shape) if wanted else None

    def rows(self, name: str, *shape: int) -> Rows:
        """A table to look rows up in, kept as the file keeps it where that is served.

        Raises:
            ModelFileError: as when called.
        """
        weights = self._weights
        if not isinstance(weights, StoredWeights) or name not in weights:
            return DenseRows(self(name, *shape))
        if self._device.type != "cpu":
            return DenseRows(self(name, *shape))
        found = weights.rows(name, self._dtype)
        check_shape(name, found.shape, shape)
        self._left.discard(name)
        return found

    def ignore(self, *names: str) -> None:
        """These have their place elsewhere, or may be there and are not used."""
        self._left.difference_update(names)

    def finish(self) -> None:
        """Nothing must be left over.

        Raises:
            ModelFileError: naming tensors that no part of the model asked for.
        """
        left = [name for name in self._left if not name.endswith("rotary_emb.inv_freq")]
        if left:
            names = ", ".join(sorted(left)[:5])
            raise ModelFileError(f"tensors without a place in the model: {names}")


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
    check_shape(name, tuple(tensor.shape), shape)
    return tensor


def check_shape(name: str, found: tuple[int, ...], wanted: tuple[int, ...]) -> None:
    """Raise ModelFileError if they differ."""
    if found != wanted:
        raise ModelFileError(f"tensor {name!r} has shape {found}, not {wanted}")
