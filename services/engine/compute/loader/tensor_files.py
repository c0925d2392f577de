"""The tensors of safetensors files: where each one is, checked against the files' lengths.

Format: a length of 8 bytes (little-endian), a head of that length (JSON: tensor name to dtype,
shape and data_offsets), then the data. Tensors are mapped, so only what is used is read.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from services.engine.contract.model_config import ModelFileError

MAX_HEAD_BYTES = 100_000_000
"""As in the safetensors package."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where and how a tensor is stored."""

    file: Path
    dtype: str
    """Name in the head of the file, e.g. "BF16" or "F8_E4M3"."""
    shape: tuple[int, ...]
    nbytes: int


class TensorFiles:
    """Tensors by name over all files of a model."""

    def __init__(self, files: Sequence[Path]) -> None:
        """Read the heads of the files.

        Raises:
            ModelFileError: a file cannot be read or is cut short, or two files hold one tensor.
        """
        self.entries: dict[str, StoredTensor] = {}
        self._opened: dict[Path, Any] = {}
        for path in files:
            for name, entry in _read_head(path).items():
                if name in self.entries:
                    raise ModelFileError(
                        f"{path}: tensor {name!r} is also in {self.entries[name].file.name}: "
                        "remove the file that does not belong to the model"
                    )
                self.entries[name] = entry

    def __contains__(self, name: object) -> bool:
        return name in self.entries

    def read(self, name: str) -> torch.Tensor:
        """The tensor as it is stored, mapped from its file.

        Raises:
            KeyError: there is no such tensor.
            ModelFileError: the file cannot be read.
        """
        path = self.entries[name].file
        try:
            if path not in self._opened:
                self._opened[path] = safe_open(path, framework="pt")
            tensor: torch.Tensor = self._opened[path].get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise ModelFileError(f"{path}: tensor {name!r}: {error}") from error
        return tensor

    def error(self, name: str, problem: str) -> ModelFileError:
        """An error that names the tensor and, if there is such a tensor, its file."""
        entry = self.entries.get(name)
        where = f"{entry.file}: " if entry else ""
        return ModelFileError(f"{where}tensor {name!r}: {problem}")

    def check_shape(self, name: str, *wanted: int) -> None:
        """Check that a tensor exists and has a shape.

        Raises:
            ModelFileError: it does not.
        """
        if name not in self.entries:
            raise self.error(name, "missing from the model's files")
        if self.entries[name].shape != wanted:
            raise self.error(name, f"has shape {self.entries[name].shape}, expected {wanted}")

    def check_dtype(self, name: str, *wanted: str) -> None:
        """Check the number format of a tensor that exists.

        Raises:
            ModelFileError: it is another one.
        """
        found = self.entries[name].dtype
        if found not in wanted:
            raise self.error(name, f"is {found}, expected {' or '.join(wanted)}")


def _read_head(path: Path) -> dict[str, StoredTensor]:
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > min(MAX_HEAD_BYTES, size - 8):
                raise ModelFileError(
                    f"{path}: the head has {length} bytes, but the file has {size}: it is not a "
                    "safetensors file, or is cut short"
                )
            head = json.loads(file.read(length))
    except (OSError, ValueError, RecursionError) as error:
        if isinstance(error, ModelFileError):
            raise
        raise ModelFileError(f"{path}: the head cannot be read: {error}") from error
    if not isinstance(head, dict):
        raise ModelFileError(f"{path}: the head is not a JSON object")
    entries = {}
    for name, raw in head.items():
        if name != "__metadata__":
            entries[name] = _entry(path, name, raw, size - 8 - length)
    return entries


def _entry(path: Path, name: str, raw: Any, data_bytes: int) -> StoredTensor:
    """One entry of a head.

    Args:
        data_bytes: length of the file after the head.
    """
    if not isinstance(raw, Mapping):
        raise ModelFileError(f"{path}: tensor {name!r}: its entry is not an object")
    shape, place = (_sizes(raw.get(key)) for key in ("shape", "data_offsets"))
    if shape is None or place is None or len(place) != 2 or place[0] > place[1]:
        raise ModelFileError(f"{path}: tensor {name!r}: shape or data_offsets are wrong: {raw!r}")
    begin, end = place
    if end > data_bytes:
        raise ModelFileError(
            f"{path}: the file ends {end - data_bytes} bytes before the end of tensor {name!r}: "
            "download it again"
        )
    return StoredTensor(path, str(raw.get("dtype")), shape, end - begin)


def _sizes(value: Any) -> tuple[int, ...] | None:
    """A list of numbers from 0; None if it is not one."""
    if isinstance(value, list) and all(type(item) is int and item >= 0 for item in value):
        return tuple(value)
    return None
