"""The feed-forward network of a layer with experts: its router chooses the experts of each row.

The router deals with logical experts. Slots, replicas and ranks are handled by `expert_parallel/`.
"""

from typing import Protocol

import torch
from torch import Tensor

from kernels.interface import Kernels, Routing
from services.engine.compute.models.architecture import Experts
from services.engine.compute.models.expert_weights import stored_names
from services.engine.compute.models.mlp import Mlp
from services.engine.compute.models.weights import WeightReader, add_bias
from services.engine.contract.model_config import ModelConfig


class RunExperts(Protocol):
    """Runs rows through the experts chosen for them, on whichever rank holds those."""

    def __call__(self, layer: int, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """Weighted sum of the chosen experts' outputs.

        Args:
            layer: index among the layers with experts.
            x: [T, hidden] normed rows.
            ids: [T, k] int64 logical experts; -1 for none.
            weights: [T, k] float32.

        Returns:
            [T, hidden], summed in float32 in the order of the columns of `ids`.
        """


class MoeBlock:
    """Router, experts and shared expert of one layer."""

    def __init__(
        self,
        config: ModelConfig,
        kernels: Kernels,
        reader: WeightReader,
        index: int,
        made_of: Experts,
        experts: RunExperts,
        *,
        number: int | None = None,
    ) -> None:
        """Pack the weights of router and shared expert; those of the experts are read elsewhere.

        Args:
            index: of the layer, among all layers.
            number: by which `experts` knows the layer; None: its place in `MoeConfig.layers`.

        Raises:
            ModelFileError: a tensor is missing or of the wrong shape.
        """
        moe = config.moe
        assert moe is not None, "a dense model has no MoeBlock"
        at = f"model.layers.{index}"
        self._routing = Routing(
            moe.top_k, made_of.scoring, moe.norm_topk_prob, moe.scale, moe.groups, moe.top_groups
        )
        self._route = kernels.route
        self._layer = moe.layers.index(index) if number is None else number
        self._experts = experts
        # Sigmoids of many experts lie close together: their scores are float32 in every format.
        dtype = None if made_of.scoring == "softmax" else torch.float32
        router = reader(
            f"{at}.{made_of.router}.weight", moe.num_experts, config.hidden_size, dtype=dtype
        )
        self._router = kernels.pack(router)
        self._dtype = router.dtype
        self._score_bias, self._choice_bias = (
            reader(f"{at}.{name}", moe.num_experts, dtype=torch.float32) if name else None
            for name in (made_of.score_bias, made_of.choice_bias)
        )
        self._shared: Mlp | None = None
        if made_of.shared and moe.num_shared:
            size = moe.intermediate_size * moe.num_shared
            self._shared = Mlp(config, kernels, reader, at, made_of.shared, size=size)
        reader.ignore(*stored_names(made_of.experts, index, moe.num_experts))

    @property
    def nbytes(self) -> int:
        """Memory of router and shared expert in bytes.

        Experts are counted by the rank that holds them.
        """
        biases = (self._score_bias, self._choice_bias)
        rows = sum(bias.nbytes for bias in biases if bias is not None)
        return self._router.nbytes + rows + (self._shared.nbytes if self._shared else 0)

    def add_to(self, x: Tensor, normed: Tensor) -> None:
        """x [T, hidden] += the experts' output for the normed rows [T, hidden]."""
        scores = self._router(normed.to(self._dtype))
        if self._score_bias is not None:
            scores = add_bias(scores.float(), self._score_bias)
        weights, ids = self._route(scores, self._routing, self._choice_bias, None)
        x.add_(self._experts(self._layer, normed, ids, weights))
        if self._shared is not None:
            self._shared.add_to(x, normed)
