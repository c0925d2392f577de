"""The tensors of a Hugging Face folder under their published names, decoded one at a time."""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from services.engine.compute.loader.formats.layouts import NOT_USED, Coded, find_coded
from services.engine.compute.loader.formats.words import GptqWeight
from services.engine.compute.loader.progress import ReadTensors
from services.engine.compute.loader.tensor_files import TensorFiles
from services.engine.compute.models.rows import DenseRows, Rows
from services.engine.compute.models.weights import StoredWeights
from services.engine.model_files.quantisation import Quantisation

_CHUNK = 1 << 23
"""Numbers that are decoded at one time: scratch memory stays below about 200 MiB."""
_NO_NUMBERS = ("F4", "F6_E2M3", "F6_E3M2", "F8_E4M3", "F8_E5M2", "F8_E8M0", "I8", "U8")
"""Formats that mean nothing without a scale."""


@dataclass(frozen=True, slots=True)
class _Plain:
    """A tensor that is stored as it is used. See layouts.Coded."""

    name: str
    shape: tuple[int, ...]

    @property
    def parts(self) -> tuple[str, ...]:
        return (self.name,)

    def decode(self, files: TensorFiles, begin: int, end: int) -> Tensor:
        tensor = files.read(self.name)
        return tensor if (begin, end) == (0, _length(self.shape)) else tensor[begin:end]


class FolderWeights(StoredWeights):
    """See StoredWeights; plain tensors are mapped from their files, quantised ones are decoded."""

    def __init__(
        self,
        files: TensorFiles,
        quantisation: Quantisation | None = None,
        *,
        name: str = "the model",
        most_rows: Mapping[str, int] | None = None,
    ) -> None:
        """Find the tensors; none is read.

        Args:
            name: the model, for progress lines.
            most_rows: rows to which a tensor is cut, by name.

        Raises:
            ModelFileError: a quantised tensor lacks a part, or its format is not served.
        """
        self._files = files
        self._most_rows = most_rows or {}
        self._found: dict[str, Coded] = find_coded(files, quantisation) if quantisation else {}
        parts = {part for coded in self._found.values() for part in coded.parts}
        packed = (coded for coded in self._found.values() if isinstance(coded, GptqWeight))
        self._packers_biases = {f"{coded.at}.bias" for coded in packed}
        for stored, entry in files.entries.items():
            if stored in parts or (quantisation and stored.endswith(NOT_USED)):
                continue
            if entry.dtype in _NO_NUMBERS:
                known = "no quantization_config"
                if quantisation:
                    known = f"{quantisation.label}: its weight or its scale is missing"
                raise files.error(stored, f"is {entry.dtype}, but config.json has {known}")
            self._found[stored] = _Plain(stored, entry.shape)
        self._reads = ReadTensors(name, {name: self._stored_bytes(name) for name in self._found})

    def __getitem__(self, name: str) -> Tensor:
        return self._range(name, 0, _length(self.shape(name)))

    def __contains__(self, name: object) -> bool:
        return name in self._found  # Mapping's own would decode the tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._found)

    def __len__(self) -> int:
        return len(self._found)

    def shape(self, name: str) -> tuple[int, ...]:
        """See StoredWeights."""
        shape = self._found[name].shape
        most = self._most_rows.get(name)
        return shape if most is None else (min(most, shape[0]), *shape[1:])

    def part(self, name: str, index: int, count: int) -> Tensor:
        """See StoredWeights; no other part is read."""
        length = _length(self.shape(name))
        size = math.ceil(length / count)
        return self._range(name, min(length, index * size), min(length, (index + 1) * size))

    def where(self, name: str) -> Path | None:
        """See StoredWeights."""
        found = self._found.get(name)
        return self._files.entries[found.parts[0]].file if found else None

    def is_packers_bias(self, name: str) -> bool:
        """See StoredWeights."""
        return name in self._packers_biases

    def skip(self, names: Iterable[str]) -> None:
        """See StoredWeights."""
        self._reads.skip(names)

    def rows(self, name: str, dtype: torch.dtype) -> Rows:
        """See StoredWeights."""
        return DenseRows(self[name].to(dtype))

    def _range(self, name: str, begin: int, end: int) -> Tensor:
        """Entries `begin` to `end` of a tensor; quantised ones are decoded in chunks."""
        coded = self._found[name]
        self._reads.count(name)
        step = max(1, _CHUNK // max(1, math.prod(coded.shape[1:])))
        if isinstance(coded, _Plain) or end - begin <= step:
            return coded.decode(self._files, begin, end)
        out = torch.empty(end - begin, *coded.shape[1:])
        for at in range(begin, end, step):
            last = min(end, at + step)
            out[at - begin : last - begin] = coded.decode(self._files, at, last)
        return out

    def _stored_bytes(self, name: str) -> int:
        return sum(self._files.entries[part].nbytes for part in self._found[name].parts)


def _length(shape: tuple[int, ...]) -> int:
    return shape[0] if shape else 0
