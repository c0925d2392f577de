"""Qwen3 with experts (Qwen Team 2025): no shared expert, softmax router."""

from services.engine.compute.models.decoder import FeedForward
from services.engine.compute.models.expert_weights import expert_names
from services.engine.compute.models.moe import MoeBlock
from services.engine.compute.models.qwen3 import Qwen3Model
from services.engine.compute.models.weights import WeightReader


class Qwen3MoeModel(Qwen3Model):
    """Layers in `MoeConfig.layers` route their rows to experts; the other layers are dense."""

    def _feed_forward(self, reader: WeightReader, index: int, at: str) -> FeedForward:
        moe = self.config.moe
        if moe is None or index not in moe.layers:
            return super()._feed_forward(reader, index, at)
        if self._experts is None:
            raise ValueError("experts is None: a model with experts needs a RunExperts")
        for expert in range(moe.num_experts):
            reader.ignore(*expert_names(index, expert))
        router = reader(f"{at}.mlp.gate.weight", moe.num_experts, self.config.hidden_size)
        order = moe.layers.index(index)
        return MoeBlock(moe, self._kernels, router, order, self._experts)
