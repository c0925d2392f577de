"""The stored tensors of experts: three per expert, mapped from their file until they are read."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from services.engine.compute.models.weights import checked
from services.engine.contract.model_config import ModelConfig, ModelFileError


def expert_names(layer: int, expert: int) -> tuple[str, str, str]:
    """Published names of an expert's gate, up and down; `layer` counts all layers."""
    at = f"model.layers.{layer}.mlp.experts.{expert}"
    return f"{at}.gate_proj.weight", f"{at}.up_proj.weight", f"{at}.down_proj.weight"


@dataclass(frozen=True)
class ExpertWeights:
    """Reads the weights of any expert of a model, as often as needed.

    A rank reads the experts that it needs from the files, at the start and when a placement moves
    experts. So no rank has to send weights to another one while it computes.
    """

    tensors: tuple[tuple[tuple[Tensor, Tensor, Tensor], ...], ...]
    """[layers with experts][experts]: gate [F, hidden], up [F, hidden], down [hidden, F]; F is the
    expert's intermediate size."""
    dtype: torch.dtype
    device: torch.device

    @property
    def hidden_size(self) -> int:
        """Hidden size: columns of the rows that experts read and write."""
        return self.tensors[0][0][0].shape[1]

    @classmethod
    def find(
        cls,
        config: ModelConfig,
        weights: Mapping[str, Tensor],
        dtype: torch.dtype,
        device: torch.device,
    ) -> "ExpertWeights":
        """Find all experts by name; no weight is read yet.

        Raises:
            ModelFileError: a tensor is missing or of the wrong shape, or the model has no experts.
        """
        moe = config.moe
        if moe is None:
            raise ModelFileError("the model is dense: its configuration has no experts")
        hidden, size = config.hidden_size, moe.intermediate_size

        def one(layer: int, expert: int) -> tuple[Tensor, Tensor, Tensor]:
            gate, up, down = expert_names(layer, expert)
            return (
                checked(weights, gate, size, hidden),
                checked(weights, up, size, hidden),
                checked(weights, down, hidden, size),
            )

        tensors = tuple(
            tuple(one(layer, expert) for expert in range(moe.num_experts)) for layer in moe.layers
        )
        return cls(tensors, dtype, device)

    def read(self, layer: int, expert: int) -> tuple[Tensor, Tensor]:
        """Gate over up [2 F, hidden], and down [hidden, F], in the model's number format."""
        gate, up, down = self.tensors[layer][expert]
        return self._ready(torch.cat((gate, up))), self._ready(down)

    def _ready(self, tensor: Tensor) -> Tensor:
        return tensor.to(device=self.device, dtype=self.dtype)


def is_expert_name(name: str) -> bool:
    """Whether a published tensor name is one of `expert_names`."""
    return ".mlp.experts." in name
