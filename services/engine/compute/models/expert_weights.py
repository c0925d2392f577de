"""The stored tensors of experts, which stay in their file until they are read."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.interface import Gate
from services.engine.compute.models.architecture import SWIGLU, ExpertNames, StackedExperts
from services.engine.compute.models.architectures import ARCHITECTURES
from services.engine.compute.models.architectures.deepseek import V4_DRAFT_EXPERTS
from services.engine.compute.models.weights import StoredWeights, check_shape, first_part
from services.engine.contract.model_config import ModelConfig, ModelFileError


def expert_names(layer: int, expert: int, names: ExpertNames | None = None) -> tuple[str, str, str]:
    """Published names of an expert's gate, up and down; `layer` counts all layers."""
    names = names or ExpertNames()
    at = f"{names.layers}.{layer}"
    gate, up, down = (
        f"{at}.{name.format(expert)}.weight" for name in (names.gate, names.up, names.down)
    )
    return gate, up, down


def stored_names(names: ExpertNames | StackedExperts, layer: int, count: int) -> tuple[str, ...]:
    """Names of all tensors of a layer's experts; `layer` counts all layers."""
    if isinstance(names, ExpertNames):
        return tuple(name for expert in range(count) for name in expert_names(layer, expert, names))
    parts = (names.gate_up, names.gate_up_bias, names.down, names.down_bias)
    return tuple(f"model.layers.{layer}.{part}" for part in parts)


@dataclass(frozen=True, slots=True)
class ExpertTensors:
    """The weights of one expert in the model's number format; F is its intermediate size."""

    gate_up: Tensor
    """[2 F, hidden]: gate over up."""
    down: Tensor
    """[hidden, F]."""
    gate_up_bias: Tensor | None = None
    """[2 F]."""
    down_bias: Tensor | None = None
    """[hidden]."""


@dataclass(frozen=True)
class ExpertWeights:
    """Reads the weights of any expert of a model, as often as needed.

    A rank reads the experts that it needs from the files, at the start and when a placement moves
    experts. So no rank has to send weights to another one while it computes.
    """

    weights: Mapping[str, Tensor]
    names: tuple[tuple[tuple[str, ...], ...], ...]
    """[layers with experts][experts]: gate [F, hidden], up [F, hidden], down [hidden, F]; or what
    StackedExperts names: [E, hidden, 2 F], [E, 2 F], [E, F, hidden], [E, hidden], E experts."""
    hidden_size: int
    """Columns of the rows that experts read and write."""
    dtype: torch.dtype
    device: torch.device
    gate: Gate = SWIGLU

    @classmethod
    def find(
        cls,
        config: ModelConfig,
        weights: Mapping[str, Tensor],
        dtype: torch.dtype,
        device: torch.device,
        *,
        drafting: Sequence[int] | None = None,
    ) -> "ExpertWeights":
        """Find all experts by name; no weight is read yet.

        Args:
            drafting: layers that draft tokens, by the numbers in their names, instead of the
                model's own.

        Raises:
            ModelFileError: a tensor is missing or of the wrong shape, or the model has no experts.
        """
        made_of = ARCHITECTURES[config.architecture].experts
        if config.moe is None or made_of is None:
            raise ModelFileError("the model is dense: its configuration has no experts")
        layers, experts = config.moe.layers, made_of.experts
        if drafting is not None:
            layers = tuple(drafting)
            if config.v4 is not None:
                experts = V4_DRAFT_EXPERTS
        names = tuple(
            _named(weights, config, experts, layer)
            if isinstance(experts, ExpertNames)
            else _stacked(weights, config, experts, layer)
            for layer in layers
        )
        gate = made_of.gate if config.v4 is None else Gate(limit=config.v4.swiglu_limit)
        return cls(weights, names, config.hidden_size, dtype, device, gate)

    def skip_others(self, held: Collection[tuple[int, int]]) -> None:
        """Leave the experts that are not among `held` (layer, expert) out of the progress."""
        if isinstance(self.weights, StoredWeights):
            for layer, row in enumerate(self.names):
                others = (names for expert, names in enumerate(row) if (layer, expert) not in held)
                self.weights.skip(name for names in others if len(names) == 3 for name in names)

    def read(self, layer: int, expert: int) -> ExpertTensors:
        """The weights of an expert; `layer` counts the layers with experts.

        Raises:
            ModelFileError: a stored value cannot be decoded.
        """
        names = self.names[layer][expert]
        if len(names) == 3:
            gate, up, down = (self.weights[name] for name in names)
            return ExpertTensors(self._ready(torch.cat((gate, up))), self._ready(down))
        count = len(self.names[layer])
        gate_up, gate_up_bias, down, down_bias = (
            first_part(self.weights, name, expert, count)[0] for name in names
        )
        return ExpertTensors(
            self._ready(_apart(gate_up.T)),
            self._ready(down.T.contiguous()),
            self._ready(_apart(gate_up_bias)),
            self._ready(down_bias),
        )

    def _ready(self, tensor: Tensor) -> Tensor:
        return tensor.to(device=self.device, dtype=self.dtype)


def is_expert_name(name: str) -> bool:
    """Whether a published tensor name is one of an expert's."""
    return ".experts." in name


def _named(
    weights: Mapping[str, Tensor], config: ModelConfig, names: ExpertNames, layer: int
) -> tuple[tuple[str, ...], ...]:
    assert config.moe is not None
    hidden, size = config.hidden_size, config.moe.intermediate_size
    shapes = ((size, hidden), (size, hidden), (hidden, size))
    found = tuple(expert_names(layer, expert, names) for expert in range(config.moe.num_experts))
    for of_expert in found:
        for name, shape in zip(of_expert, shapes, strict=True):
            check_shape(weights, name, shape)
    return found


def _stacked(
    weights: Mapping[str, Tensor], config: ModelConfig, names: StackedExperts, layer: int
) -> tuple[tuple[str, ...], ...]:
    assert config.moe is not None
    count, size, hidden = config.moe.num_experts, config.moe.intermediate_size, config.hidden_size
    shapes = ((hidden, 2 * size), (2 * size,), (size, hidden), (hidden,))
    stacks = stored_names(names, layer, count)
    for name, shape in zip(stacks, shapes, strict=True):
        check_shape(weights, name, (count, *shape))
    return (stacks,) * count


def _apart(rows: Tensor) -> Tensor:
    """Rows of gate and up that alternate, as gate over up."""
    return torch.cat((rows[0::2], rows[1::2]))
