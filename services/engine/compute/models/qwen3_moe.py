"""The Qwen3 architecture with experts (Qwen Team 2025): no shared expert, softmax router."""

from services.engine.compute.models.decoder import FeedForward
from services.engine.compute.models.expert_weights import expert_names
from services.engine.compute.models.moe import MoeBlock
from services.engine.compute.models.qwen3 import Qwen3Model
from services.engine.compute.models.weights import Taker
from services.engine.contract.model_config import ModelFileError


class Qwen3MoeModel(Qwen3Model):
    """Layers named by `MoeConfig.layers` route their rows to experts, the others are dense."""

    def _feed_forward(self, take: Taker, index: int, at: str) -> FeedForward:
        moe = self.config.moe
        if moe is None or index not in moe.layers:
            return super()._feed_forward(take, index, at)
        if self._experts is None:
            raise ModelFileError("the model has experts, but nothing runs them")
        for expert in range(moe.num_experts):
            take.ignore(*expert_names(index, expert))
        router = take(f"{at}.mlp.gate.weight", moe.num_experts, self.config.hidden_size)
        order = moe.layers.index(index)
        return MoeBlock(moe, self._kernels, router, order, self._experts)
