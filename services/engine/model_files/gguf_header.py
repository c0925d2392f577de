"""Reads the header of a GGUF file (versions 2 and 3): metadata, and the place of each tensor.

`gguf.GGUFReader` is not used, since it takes seconds to read a vocabulary. The gguf package decodes
the tensors. Format: docs/gguf.md of ggml.
"""

import contextlib
import mmap
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.engine.contract.model_config import ModelFileError
from services.engine.model_files.file_errors import naming_file

MAGIC = b"GGUF"
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q"}
_SCALARS[12] = "d"
_STRING, _ARRAY = 8, 9
_LENGTH = struct.Struct("<Q")
MAX_DEPTH = 4
"""Arrays in arrays; files in use nest none."""
MAX_ITEMS = 4_000_000
"""Strings and arrays of all metadata together; the largest vocabularies have a million."""
MAX_DIMS = 8
"""Dimensions of a tensor; the format has 4."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where and how a tensor is stored."""

    shape: tuple[int, ...]
    """Outermost size first; the file has the reverse order."""
    ggml_type: int
    """`gguf.constants.GGMLQuantizationType`."""
    offset: int
    """Bytes from the start of the file."""


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """Metadata by key, and tensors by name."""

    metadata: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]


def read_header(path: Path) -> GgufHeader:
    """Read the metadata and the tensor table of a file.

    Raises:
        ModelFileError: not a GGUF file, a version that is not 2 or 3, or a header cut short.
    """
    with path.open("rb") as file:
        if file.read(4) != MAGIC:
            raise ModelFileError(f"{path}: not a GGUF file (it does not start with {MAGIC!r})")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data, naming_file(path):
            try:
                return _parse(_Cursor(data, 4))
            except (struct.error, UnicodeDecodeError, IndexError) as error:
                raise ModelFileError(
                    f"{path}: broken or incomplete GGUF header: {error}"
                ) from error


def _parse(cursor: "_Cursor") -> GgufHeader:
    version = cursor.scalar("I")
    if version not in (2, 3):
        raise ModelFileError(f"GGUF version {version} is not supported, only 2 and 3")
    num_tensors, num_keys = cursor.scalar("Q"), cursor.scalar("Q")
    metadata = {}
    for _ in range(num_keys):
        key = cursor.string()
        with _naming_key(key):
            metadata[key] = cursor.value(cursor.scalar("I"))
    found = []
    for _ in range(num_tensors):
        name = cursor.string()
        num_dims = cursor.scalar("I")
        if num_dims > MAX_DIMS:
            raise ModelFileError(
                f"tensor {name!r} has {num_dims} dimensions, at most {MAX_DIMS} are read"
            )
        dims = cursor.scalars("Q", num_dims)
        found.append((name, dims[::-1], cursor.scalar("I"), cursor.scalar("Q")))
    align = metadata.get("general.alignment", 32)
    if not isinstance(align, int) or not 1 <= align <= 1 << 20:
        raise ModelFileError(f"general.alignment must be 1 to {1 << 20} bytes, got {align!r}")
    start = -(-cursor.at // align) * align
    tensors = {name: TensorInfo(dims, kind, start + at) for name, dims, kind, at in found}
    return GgufHeader(metadata, tensors)


@contextlib.contextmanager
def _naming_key(key: str) -> Iterator[None]:
    """Prefix the message of a ModelFileError in the body with the key."""
    try:
        yield
    except ModelFileError as error:
        raise ModelFileError(f"{key[:128]}: {error}") from error


class _Cursor:
    """Reads little-endian values in sequence."""

    def __init__(self, data: mmap.mmap, at: int) -> None:
        self._data = data
        self._items = 0
        self.at = at

    def scalar(self, code: str) -> Any:
        return self.scalars(code, 1)[0]

    def scalars(self, code: str, count: int) -> tuple[Any, ...]:
        layout = f"<{count}{code}"
        values = struct.unpack_from(layout, self._data, self.at)
        self.at += struct.calcsize(layout)
        return values

    def string(self) -> str:
        (size,) = struct.unpack_from("<Q", self._data, self.at)
        start = self.at + 8
        self.at = start + size
        if self.at > len(self._data):
            raise IndexError("a string extends beyond the end of the file")
        return self._data[start : self.at].decode("utf-8", errors="strict")

    def strings(self, count: int) -> list[str]:
        """`count` strings; a vocabulary has hundreds of thousands."""
        self._count_items(count)
        data, at, found = self._data, self.at, []
        for _ in range(count):
            (size,) = _LENGTH.unpack_from(data, at)
            at += _LENGTH.size + size
            if at > len(data):
                raise IndexError("a string extends beyond the end of the file")
            found.append(data[at - size : at].decode("utf-8", errors="strict"))
        self.at = at
        return found

    def _count_items(self, count: int) -> None:
        self._items += count
        if self._items > MAX_ITEMS:
            raise ModelFileError(f"more than {MAX_ITEMS} strings and arrays in the metadata")

    def value(self, kind: int, depth: int = 0) -> Any:
        self._count_items(1)
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            if depth == MAX_DEPTH:
                raise ModelFileError(f"arrays are nested more than {MAX_DEPTH} deep")
            item, count = self.scalar("I"), self.scalar("Q")
            if item in _SCALARS:
                return list(self.scalars(_SCALARS[item], count))
            if item == _STRING:
                return self.strings(count)
            return [self.value(item, depth + 1) for _ in range(count)]
        if kind not in _SCALARS:
            raise ModelFileError(f"unknown GGUF value type {kind}")
        return self.scalar(_SCALARS[kind])
