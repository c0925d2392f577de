"""A DeepSeek V4 decoder: embedding, layers on several residual streams, head.

It reads the published tensor names. It computes in float32, and keeps no state of any request: all
of that is in `memory.V4Memory`.
"""

import logging
from collections.abc import Mapping

import torch
from torch import Tensor

from kernels.interface import Kernels
from services.engine.compute.models.v4_modules.attention import V4Attention
from services.engine.compute.models.v4_modules.experts import LocalExperts, V4FeedForward
from services.engine.compute.models.v4_modules.hyper_connections import (
    HyperConnection,
    StreamHead,
    collapse,
    spread,
)
from services.engine.compute.models.v4_modules.memory import LayerMemory, V4Memory
from services.engine.compute.models.v4_modules.rotary import angles
from services.engine.compute.models.v4_modules.round_plan import RoundPlan
from services.engine.compute.models.weights import WeightReader
from services.engine.contract.deepseek_v4 import DeepseekV4Config

log = logging.getLogger(__name__)


class V4Layer:
    """One layer: two sublayers, each connected to the streams in its own way."""

    def __init__(
        self,
        config: DeepseekV4Config,
        kernels: Kernels,
        reader: WeightReader,
        index: int,
        experts: LocalExperts,
    ) -> None:
        at, kind = f"layers.{index}", config.layers[index]
        self._kernels, self._eps = kernels, config.rms_norm_eps
        self.compressed = kind.ratio > 0
        self._to_attention = HyperConnection(config, kernels, reader, f"{at}.hc_attn")
        self._attention_norm = reader(f"{at}.attn_norm.weight", config.hidden_size)
        self._attention = V4Attention(config, kernels, reader, f"{at}.attn", kind)
        self._to_experts = HyperConnection(config, kernels, reader, f"{at}.hc_ffn")
        self._experts_norm = reader(f"{at}.ffn_norm.weight", config.hidden_size)
        self._experts = V4FeedForward(config, kernels, reader, index, experts)

    @property
    def nbytes(self) -> int:
        parts = (self._to_attention, self._attention, self._to_experts, self._experts)
        rows = self._attention_norm.nbytes + self._experts_norm.nbytes
        return rows + sum(part.nbytes for part in parts)

    def __call__(
        self, streams: Tensor, cos_sin: Tensor, plan: RoundPlan, memory: LayerMemory
    ) -> Tensor:
        """New streams [T, s, hidden] of streams [T, s, hidden]."""
        connection = self._to_attention.connect(streams)
        x = self._norm(collapse(streams, connection.pre), self._attention_norm)
        streams = spread(streams, self._attention(x, cos_sin, plan, memory), connection)
        connection = self._to_experts.connect(streams)
        x = self._norm(collapse(streams, connection.pre), self._experts_norm)
        return spread(streams, self._experts(x, plan.token_ids), connection)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return self._kernels.rms_norm(x, weight, self._eps)


class V4Model:
    """All layers, with weights packed for one kernel set."""

    def __init__(
        self,
        config: DeepseekV4Config,
        weights: Mapping[str, Tensor],
        kernels: Kernels,
        *,
        max_positions: int,
    ) -> None:
        """Pack the weights.

        Args:
            max_positions: positions that a sequence may reach.

        Raises:
            ModelFileError: a tensor is missing, left over or of the wrong shape.
        """
        self.config = config
        self._kernels = kernels
        reader = WeightReader(weights, torch.float32, torch.device("cpu"))
        size = (config.vocab_size, config.hidden_size)
        self._embedding = reader.rows("embed.weight", *size)
        self._experts = LocalExperts(config, kernels, reader)
        self._layers = [
            V4Layer(config, kernels, reader, index, self._experts)
            for index in range(len(config.layers))
        ]
        self._join = StreamHead(config, kernels, reader, "hc_head")
        self._norm = reader("norm.weight", config.hidden_size)
        self._head = kernels.pack(reader("head.weight", *size))
        self._angles = {
            compressed: angles(config, max_positions, compressed=compressed)
            for compressed in (False, True)
        }
        _ignore_mtp(weights, reader)
        reader.check_all_read()

    @property
    def nbytes(self) -> int:
        """Memory of the packed weights in bytes, experts included."""
        rows = self._embedding.nbytes + self._norm.nbytes + self._head.nbytes
        layers = sum(layer.nbytes for layer in self._layers)
        return rows + layers + self._experts.nbytes + self._join.nbytes

    def forward(self, plan: RoundPlan, memory: V4Memory) -> Tensor:
        """Compute all rows of a round and write what is kept of them.

        Returns:
            [T, hidden], before the last norm.
        """
        rows = self._embedding(plan.token_ids)
        streams = rows.unsqueeze(1).repeat(1, self.config.streams, 1)
        for layer, kept in zip(self._layers, memory.layers, strict=True):
            streams = layer(streams, self._angles[layer.compressed], plan, kept)
        return self._join(streams)

    def logits(self, hidden: Tensor) -> Tensor:
        """[rows, vocabulary] float32, of rows [rows, hidden] that `forward` returned."""
        return self._head(self._kernels.rms_norm(hidden, self._norm, self.config.rms_norm_eps))


def _ignore_mtp(weights: Mapping[str, Tensor], reader: WeightReader) -> None:
    """Accept the layers for multi-token prediction unread: nothing speculates yet."""
    names = [name for name in weights if name.startswith("mtp.")]
    if names:
        reader.ignore(*names)
        log.info("%d tensors of multi-token prediction (mtp.*) are not loaded", len(names))
