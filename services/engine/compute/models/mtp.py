"""Layers that draft tokens (multi-token prediction, MTP): which of them are kept, and who has them.

They are packed for speculation, and no round runs them yet. Source: DeepSeek-AI 2024 (DeepSeek-V3),
section 2.2.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from kernels.interface import Linear
from services.engine.compute.models.architectures import ARCHITECTURES
from services.engine.compute.models.moe import RunExperts
from services.engine.contract.model_config import ModelConfig

_OTHER_DRAFTER = "mtp.0.main_proj."
"""Begins the names of a drafter that reads several layers (DSpark), in files of DeepSeek V4."""
_V4_NAME = re.compile(r"mtp\.(\d+)\.")
_NAME = re.compile(r"model\.layers\.(\d+)\.")


class Part(Protocol):
    """Packed weights."""

    @property
    def nbytes(self) -> int:
        """Memory in bytes, without the experts'."""


@dataclass(frozen=True, slots=True)
class KeptMtp:
    """The layers that draft tokens and are to be packed."""

    numbers: range
    """As the tensors' names have them."""
    experts: RunExperts | None
    """Runs their experts, and counts these layers from 0; None if they are dense."""
    expert_bytes: int = 0
    """Memory of their experts."""


@dataclass(frozen=True, slots=True)
class MtpLayer:
    """A packed layer that drafts tokens; its embedding and head are the model's."""

    embedding_norm: Tensor
    """[N]: of the next token's embedding."""
    hidden_norm: Tensor
    """[N]: of the last layer's row."""
    project: Linear
    """[N, 2 N]: reads the normed embedding, then the normed row."""
    layer: Part
    """A layer like those of the model."""
    norm: Tensor
    """[N]: before the head."""

    @property
    def nbytes(self) -> int:
        """Memory in bytes, without the experts'."""
        return sum(part.nbytes for part in (self.layer, self.project, *self._norms))

    @property
    def _norms(self) -> tuple[Tensor, ...]:
        return self.embedding_norm, self.hidden_norm, self.norm


def draft_names(config: ModelConfig, names: Iterable[str]) -> list[str]:
    """The tensors of layers that draft tokens: all after the last layer, or those of `mtp`."""
    if config.v4 is not None:
        return [name for name in names if name.startswith("mtp.")]
    found = ((name, _NAME.match(name)) for name in names)
    return [name for name, at in found if at and int(at[1]) >= config.num_layers]


def draft_layers(config: ModelConfig, names: Iterable[str]) -> range:
    """Numbers of the layers that draft tokens; none if the files have no tensor of them.

    If they have one, they must have all layers that the configuration announces. Files that
    transformers wrote have none, whatever the configuration says.
    """
    is_v4 = config.architecture == "deepseek_v4"
    if not is_v4 and ARCHITECTURES[config.architecture].mtp is None:
        return range(0)
    found = draft_names(config, names)
    if not found or any(name.startswith(_OTHER_DRAFTER) for name in found):
        return range(0)
    pattern, first = (_V4_NAME, 0) if is_v4 else (_NAME, config.num_layers)
    numbers = [int(at[1]) for at in map(pattern.match, found) if at]
    return range(first, max([first + config.mtp_layers, *(number + 1 for number in numbers)]))


def total_bytes(layers: Sequence[Part]) -> int:
    """Memory of packed layers, in bytes."""
    return sum(layer.nbytes for layer in layers)
