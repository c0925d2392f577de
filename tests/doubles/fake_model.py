"""A model of which only the shapes exist: for rehearsals, at any size."""

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from services.engine.compute.loader import ModelSource
from services.engine.contract.runner import SequenceMetadata
from services.engine.model_files.hf_config import folder_config
from services.engine.tiny_models.declarations import DECLARATIONS

VOCABULARY = 512


class ShapesOnly(Mapping[str, Tensor]):
    """Makes a tensor of the right shape on every access: within a rehearsal it has no memory."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self._shapes = shapes

    def __getitem__(self, name: str) -> Tensor:
        return torch.empty(self._shapes[name], dtype=torch.bfloat16)

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)

    def sizes(self) -> list[int]:
        """Elements of each tensor."""
        return [math.prod(shape) for shape in self._shapes.values()]

    def __contains__(self, name: object) -> bool:
        return name in self._shapes


def fake_source(folder: Path, architecture: str, **changes: Any) -> ModelSource:
    """A model of this architecture.

    Args:
        folder: for its config.json.
        changes: values of config.json other than those of the tiny model; None removes one.
    """
    declaration = DECLARATIONS[architecture]
    config = {**declaration.config, "vocab_size": VOCABULARY, **changes}
    config = {key: value for key, value in config.items() if value is not None}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    shapes = {tensor.name: tensor.shape for tensor in declaration.tensors(config)}
    return ModelSource(
        name=architecture,
        config=folder_config(folder),
        weights=ShapesOnly(shapes),
        read_text=_refuse,
        eos_token_ids=(1,),
        revision="sha256:0",
        quantisation="none",
    )


def _refuse() -> Any:
    """A rehearsal reads no text."""
    raise AssertionError("a rehearsal reads no tokenizer")


def rehearsed_batch(
    *counts: int, start: int = 40, block_size: int = 16, scored: bool = False
) -> list[SequenceMetadata]:
    """Sequences with so many positions after `start` others; decodes have a previous row."""
    batch = []
    for index, count in enumerate(counts):
        blocks = -(-(start + count) // block_size)
        table = tuple(range(1 + index * blocks, 1 + (index + 1) * blocks))
        previous = index if count == 1 else None
        first = start if scored and count > 1 else None
        batch.append(
            SequenceMetadata(
                index, start, (0,) * count, previous, table, True, first, None, 2 if scored else 0
            )
        )
    return batch
