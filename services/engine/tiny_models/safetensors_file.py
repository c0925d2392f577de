"""Writes a safetensors file tensor by tensor, so that a large model needs memory for one alone."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from services.engine.tiny_models.formats import Stored

_ALIGN = 8
"""Readers map the data: the head is padded to this many bytes."""


def write_safetensors(path: Path, entries: Sequence[Stored], data: Iterable[NDArray[Any]]) -> None:
    """Write the entries with their data, which is drawn one by one and in the same order.

    Raises:
        ValueError: the data of an entry has not its size.
    """
    head: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for entry in entries:
        begin, end = end, end + entry.nbytes
        head[entry.name] = {
            "dtype": entry.dtype,
            "shape": list(entry.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(head).encode()
    text += b" " * (-len(text) % _ALIGN)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for entry, values in zip(entries, data, strict=True):
            if values.nbytes != entry.nbytes:
                raise ValueError(
                    f"{entry.name}: {values.nbytes} bytes of data for {entry.nbytes} in the head"
                )
            file.write(np.ascontiguousarray(values).data)
