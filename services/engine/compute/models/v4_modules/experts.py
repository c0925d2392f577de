"""The feed-forward network of a layer: routed experts and one shared expert.

Experts bound their gate from above and their `up` on both sides before SwiGLU. The first layers
choose experts by a table of token ids; the weights are the router's in every layer.
"""

import torch
from torch import Tensor

from kernels.interface import Gate, Kernels, Routing
from services.engine.compute.models.architecture import ExpertNames
from services.engine.compute.models.architectures.deepseek import V4_EXPERTS
from services.engine.compute.models.expert_weights import stored_names
from services.engine.compute.models.moe import RunExperts
from services.engine.compute.models.weights import WeightReader
from services.engine.contract.deepseek_v4 import DeepseekSizes
from services.engine.contract.model_config import ModelFileError


class BoundedMlp:
    """The shared expert: down(silu(min(gate(x), limit)) * clamp(up(x), ±limit))."""

    def __init__(
        self, config: DeepseekSizes, kernels: Kernels, reader: WeightReader, at: str
    ) -> None:
        """Pack the weights of the expert whose tensors begin with `at`.

        Raises:
            ModelFileError: a tensor is missing or of the wrong shape.
        """
        hidden, size = config.hidden_size, config.expert_size
        gate_up = [reader(f"{at}.{part}.weight", size, hidden) for part in ("w1", "w3")]
        self._gate_mul, self._gate = kernels.gate_mul, Gate(limit=config.swiglu_limit)
        self._gate_up = kernels.pack(torch.cat(gate_up))
        self._down = kernels.pack(reader(f"{at}.w2.weight", hidden, size))

    @property
    def nbytes(self) -> int:
        """Memory of the packed weights, in bytes."""
        return self._gate_up.nbytes + self._down.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        """Output [rows, hidden] for rows [rows, hidden]."""
        return self._down(self._gate_mul(self._gate_up(x), self._gate))


class V4FeedForward:
    """Router, routed experts and shared expert of one layer."""

    def __init__(
        self,
        config: DeepseekSizes,
        kernels: Kernels,
        reader: WeightReader,
        layer: int,
        experts: RunExperts,
        *,
        hashed: bool = False,
        names: ExpertNames = V4_EXPERTS,
    ) -> None:
        """Pack the weights of router and shared expert; those of the experts are read elsewhere.

        Args:
            hashed: a table of token ids chooses the experts.
            names: of the experts.

        Raises:
            ModelFileError: a tensor is missing or of the wrong shape, or the table names an expert
                that does not exist.
        """
        at = f"{names.layers}.{layer}.ffn"
        count = config.num_experts
        self._kernels, self._layer, self._experts = kernels, layer, experts
        self._routing = Routing(
            top_k=config.top_k, scoring="sqrt_softplus", scale=config.routed_scale
        )
        self._router = kernels.pack(reader(f"{at}.gate.weight", count, config.hidden_size))
        self._bias: Tensor | None = None
        self._table: Tensor | None = None
        if hashed:
            self._table = _read_table(config, reader, f"{at}.gate.tid2eid")
        else:
            self._bias = reader(f"{at}.gate.bias", count)
        reader.ignore(*stored_names(names, layer, count))
        self._shared = BoundedMlp(config, kernels, reader, f"{at}.shared_experts")

    @property
    def nbytes(self) -> int:
        """Memory of the packed weights in bytes, without those of routed experts."""
        rows = sum(row.nbytes for row in (self._bias, self._table) if row is not None)
        return self._router.nbytes + self._shared.nbytes + rows

    def __call__(self, x: Tensor, token_ids: Tensor) -> Tensor:
        """Output [T, hidden] for normed rows [T, hidden] of the tokens [T]."""
        chosen = None if self._table is None else self._table[token_ids]
        weights, ids = self._kernels.route(self._router(x), self._routing, self._bias, chosen)
        return self._experts(self._layer, x, ids, weights).add_(self._shared(x))


def _read_table(config: DeepseekSizes, reader: WeightReader, name: str) -> Tensor:
    """Experts of each token id: [vocabulary, top_k] int64.

    Raises:
        ModelFileError: the tensor is missing, of the wrong shape, or names an unknown expert.
    """
    # float32 holds every whole number up to 2**24, more than any number of experts.
    table = reader(name, config.vocab_size, config.top_k).long()
    wrong = (table < 0) | (table >= config.num_experts)
    if wrong.any():
        token = int(wrong.any(1).nonzero()[0])
        raise ModelFileError(
            f"tensor {reader.place(name)}: the experts of token {token} are "
            f"{table[token].tolist()}, they must be 0 to {config.num_experts - 1}"
        )
    return table
