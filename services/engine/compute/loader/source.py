"""`ModelSource`, the result of every loader, and the digest of a model's files."""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from services.common.text.assets import TextAssets
from services.engine.compute.loader.progress import LoadProgress
from services.engine.contract.model_config import ModelConfig

if TYPE_CHECKING:
    import torch

READ_BYTES = 1 << 22
NOT_DIGESTED = "not digested"
"""`ModelSource.revision` of a source whose files were not read for it."""


@dataclass(frozen=True)
class ModelSource:
    """A model before it is packed for a device.

    Tensors are on the CPU and have Hugging Face's names. The rotary halves of query and key rows
    are in Hugging Face's order: first half, second half.
    """

    name: str
    config: ModelConfig
    weights: "Mapping[str, torch.Tensor]"
    read_text: Callable[[], TextAssets]
    """Reads the tokenizer and the template; an engine's core does not need them."""
    eos_token_ids: tuple[int, ...]
    revision: str
    """ "sha256:" and the digest of the weight files, in the order of their names."""
    quantisation: str
    """Number formats of quantized weights, and how they are decoded, e.g. "Q4_1+Q8_0" or
    "fp8-128x128"; "none" if all are floats."""

    @cached_property
    def text(self) -> TextAssets:
        """The tokenizer and the template.

        Raises:
            ModelFileError: they cannot be read or served.
        """
        return self.read_text()


def file_digest(paths: Sequence[Path], name: str) -> str:
    """SHA-256 digest of the concatenated contents of files, with the prefix "sha256:".

    Args:
        name: the model, for progress lines.
    """
    hasher = hashlib.sha256()
    progress = LoadProgress(f"checksum of {name}", sum(path.stat().st_size for path in paths))
    for path in paths:
        for chunk in _chunks(path):
            hasher.update(chunk)
            progress.add(len(chunk))
    return f"sha256:{hasher.hexdigest()}"


def _chunks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while chunk := file.read(READ_BYTES):
            yield chunk
