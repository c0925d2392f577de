"""Reads a model's tensors by their published names, and checks shapes and completeness."""

import logging
from abc import abstractmethod
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from services.engine.compute.models.rows import DenseRows, Rows
from services.engine.contract.model_config import ModelConfig, ModelFileError

log = logging.getLogger(__name__)

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"


class StoredWeights(Mapping[str, Tensor]):
    """Tensors that stay in their file; every access decodes the tensor anew.

    So the stored and the packed form of the whole model are never in memory together: each tensor
    is packed before the next one is read.
    """

    @abstractmethod
    def rows(self, name: str, dtype: torch.dtype) -> Rows:
        """The tensor as a table of rows, in the file's own number format where possible.

        Raises:
            KeyError: there is no such tensor.
        """

    @abstractmethod
    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, which is not decoded for it.

        Raises:
            KeyError: there is no such tensor.
        """

    def part(self, name: str, index: int, count: int) -> Tensor:
        """One of `count` equal parts of the tensor along its first dimension.

        Raises:
            KeyError: there is no such tensor.
        """
        return self[name].chunk(count)[index]

    def skip(self, names: Iterable[str]) -> None:
        """Leave tensors out of the progress: this process does not read them at the start."""

    def is_packers_bias(self, name: str) -> bool:
        """Whether the tool that packed the weights adds this bias to every architecture (GPTQ).

        In an architecture without it, it must be 0.
        """
        return False

    def where(self, name: str) -> Path | None:
        """The file of a tensor, for messages; None if it is not known."""
        return None


class WeightReader:
    """Reads tensors by name, checks their shapes, and detects tensors that were never read."""

    def __init__(
        self, weights: Mapping[str, Tensor], dtype: torch.dtype, device: torch.device
    ) -> None:
        self._weights = weights
        self._unread = set(weights)
        self._dtype = dtype
        self._device = device

    def __call__(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """The tensor on the model's device.

        Args:
            dtype: its number format; None: the model's.

        Raises:
            ModelFileError: the tensor is missing or does not have this shape.
        """
        tensor = checked(self._weights, name, *shape)
        self._unread.discard(name)
        return tensor.to(device=self._device, dtype=dtype or self._dtype)

    def norm(self, name: str, size: int, *, offset: float = 0.0) -> Tensor:
        """The weights of a norm [size] plus `offset`.

        The sum is float32 in every format: 1 plus a small number would lose most of it in 16 bits.

        Raises:
            ModelFileError: the tensor is missing or does not have this shape.
        """
        if not offset:
            return self(name, size)
        return self(name, size, dtype=torch.float32) + offset

    def optional(self, name: str, *shape: int, wanted: bool) -> Tensor | None:
        """The tensor if the model's configuration has it (`wanted`), else None.

        Raises:
            ModelFileError: a wanted tensor is missing or does not have this shape.
        """
        return self(name, *shape) if wanted else None

    def rows(self, name: str, *shape: int) -> Rows:
        """The tensor as a table for row look-ups, in the file's own format where possible.

        Raises:
            ModelFileError: the tensor is missing or does not have this shape.
        """
        weights = self._weights
        if not isinstance(weights, StoredWeights) or name not in weights:
            return DenseRows(self(name, *shape))
        if self._device.type != "cpu":
            return DenseRows(self(name, *shape))
        check_shape(weights, name, shape)
        found = weights.rows(name, self._dtype)
        self._unread.discard(name)
        return found

    def place(self, name: str) -> str:
        """The tensor's name, and its file if that is known, for messages."""
        return _named(self._weights, name)

    def ignore(self, *names: str) -> None:
        """Accept these tensors unread: they are read elsewhere, or are not used."""
        self._unread.difference_update(names)

    def ignore_drafts(self, names: Collection[str]) -> None:
        """Accept the tensors of layers that draft tokens unread, and log how many there are."""
        if not names:
            return
        log.info("%d tensors of layers that draft tokens (MTP) are not read", len(names))
        self.ignore(*names)
        if isinstance(self._weights, StoredWeights):
            self._weights.skip(names)

    def check_all_read(self) -> None:
        """Check that every tensor was read or ignored.

        Raises:
            ModelFileError: tensors are left over; the message names up to five of them.
        """
        self._drop_packers_biases()
        left = [name for name in self._unread if not name.endswith("rotary_emb.inv_freq")]
        if left:
            names = ", ".join(_named(self._weights, name) for name in sorted(left)[:5])
            raise ModelFileError(
                f"{len(left)} tensors do not belong to this architecture: {names}; check the "
                "architecture that the configuration names"
            )

    def _drop_packers_biases(self) -> None:
        """Ignore the zeros that a packer of weights wrote where the architecture has no bias.

        Raises:
            ModelFileError: one of them is not 0.
        """
        weights = self._weights
        if not isinstance(weights, StoredWeights):
            return
        for name in sorted(filter(weights.is_packers_bias, self._unread)):
            if weights[name].any():
                raise ModelFileError(
                    f"tensor {_named(weights, name)} is not 0, but this architecture has no such "
                    "bias: check the architecture that the configuration names"
                )
            self.ignore(name)


def head_weight(reader: WeightReader, config: ModelConfig) -> Tensor:
    """The head [vocabulary, hidden]; it is the embedding where the two are tied.

    Raises:
        ModelFileError: the tensor is missing or of the wrong shape.
    """
    if config.tie_embeddings:
        reader.ignore(HEAD)
    name = EMBEDDING if config.tie_embeddings else HEAD
    return reader(name, config.vocab_size, config.hidden_size)


def add_bias(x: Tensor, bias: Tensor | None) -> Tensor:
    """Add the bias [N] to x [T, N] in place, if there is one."""
    return x if bias is None else x.add_(bias)


def checked(weights: Mapping[str, Tensor], name: str, *shape: int) -> Tensor:
    """The tensor in its stored number format.

    Raises:
        ModelFileError: the tensor is missing or does not have this shape.
    """
    check_shape(weights, name, shape)
    return weights[name]


def check_shape(weights: Mapping[str, Tensor], name: str, wanted: tuple[int, ...]) -> None:
    """Check a tensor's shape against the one that the configuration implies; reads no tensor.

    Raises:
        ModelFileError: they differ, or the tensor is missing.
    """
    if name not in weights:
        raise ModelFileError(f"tensor {name!r} is missing from the model's files")
    found = stored_shape(weights, name)
    if found != wanted:
        raise ModelFileError(
            f"tensor {_named(weights, name)} has shape {found}, but the configuration implies "
            f"{wanted}"
        )


def stored_shape(weights: Mapping[str, Tensor], name: str) -> tuple[int, ...]:
    """Shape of a tensor, which is not decoded for it.

    Raises:
        KeyError: there is no such tensor.
    """
    if isinstance(weights, StoredWeights):
        return weights.shape(name)
    return tuple(weights[name].shape)


def first_part(weights: Mapping[str, Tensor], name: str, index: int, count: int) -> Tensor:
    """One of `count` equal parts of a tensor along its first dimension; see StoredWeights.part."""
    if isinstance(weights, StoredWeights):
        return weights.part(name, index, count)
    return weights[name].chunk(count)[index]


def _named(weights: Mapping[str, Tensor], name: str) -> str:
    """The tensor's name, and its file if that is known."""
    where = weights.where(name) if isinstance(weights, StoredWeights) else None
    return f"{name!r} of {where}" if where else repr(name)
