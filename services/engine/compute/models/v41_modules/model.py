"""A DeepSeek V4.1 text model: embedding, layers on several residual streams, last norm, head.

It reads the published tensor names and computes in float32; images are not served. What is kept of
a request is in the engine's blocks and slots, of which `memory.py` makes views.
"""

import logging
import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from kernels.interface import Kernels
from services.engine.compute.models.cache_tensors import CacheTensor
from services.engine.compute.models.input_metadata import InputMetadata
from services.engine.compute.models.moe import RunExperts
from services.engine.compute.models.mtp import Part
from services.engine.compute.models.v4_modules.experts import V4FeedForward
from services.engine.compute.models.v4_modules.hyper_connections import (
    HyperConnection,
    collapse,
    spread,
)
from services.engine.compute.models.v4_modules.model import ignore_mtp
from services.engine.compute.models.v4_modules.rotary import angles
from services.engine.compute.models.v41_modules.attention import V41Attention
from services.engine.compute.models.v41_modules.engram import Engram, LatestTokens
from services.engine.compute.models.v41_modules.memory import (
    LayerMemory,
    Memory,
    cache_tensors,
    make_memory,
    state_bytes,
)
from services.engine.compute.models.v41_modules.round_plan import V41Plan, plan_v41
from services.engine.compute.models.v41_modules.selection import Choice
from services.engine.compute.models.weights import WeightReader
from services.engine.contract.deepseek_v41 import DeepseekV41Config
from services.engine.contract.runner import StateBlock, StateReplay

log = logging.getLogger(__name__)
_IMAGES = ("vision.", "aligner.", "image_")
"""Prefixes of the tensors for images."""


class V41Layer:
    """One layer: look-ups by n-gram if it has them, then two sublayers on the streams.

    Each sublayer reads the streams with the weights that the one before it computed, and writes
    them with its own.
    """

    def __init__(
        self,
        config: DeepseekV41Config,
        kernels: Kernels,
        reader: WeightReader,
        index: int,
        experts: RunExperts,
    ) -> None:
        at, table = f"layers.{index}", config.engram.table(index)
        self._kernels, self._eps = kernels, config.rms_norm_eps
        self.compressed = config.layers[index].ratio > 0
        self._engram = Engram(config, kernels, reader, f"{at}.engram", table) if table else None
        self._to_attention = HyperConnection(config, kernels, reader, f"{at}.hc_attn")
        self._attention_norm = reader(f"{at}.attn_norm.weight", config.hidden_size)
        self._attention = V41Attention(config, kernels, reader, f"{at}.attn", index)
        self._to_experts = HyperConnection(config, kernels, reader, f"{at}.hc_ffn")
        self._experts_norm = reader(f"{at}.ffn_norm.weight", config.hidden_size)
        self._experts = V4FeedForward(config, kernels, reader, index, experts)
        reader.ignore(f"{at}.ffn.gate.bias_vl")  # the bias of image tokens

    @property
    def nbytes(self) -> int:
        parts = (self._to_attention, self._attention, self._to_experts, self._experts)
        rows = self._attention_norm.nbytes + self._experts_norm.nbytes
        looked_up = self._engram.nbytes if self._engram else 0
        return rows + looked_up + sum(part.nbytes for part in parts)

    def __call__(
        self,
        streams: Tensor,
        pre: Tensor,
        cos_sin: Tensor,
        tokens: Tensor,
        plan: V41Plan,
        memory: LayerMemory,
        choice: Choice,
    ) -> tuple[Tensor, Tensor]:
        """New streams [T, s, hidden], and the weights [T, s] by which the next sublayer reads them.

        Args:
            streams: [T, s, hidden].
            pre: [T, s]: weights of the sublayer before.
            tokens: compressed ids [T, longest n-gram], the latest first.
        """
        if self._engram is not None:
            streams = self._engram(streams, tokens)
        connection = self._to_attention.connect(streams)
        x = self._norm(collapse(streams, pre), self._attention_norm)
        output = self._attention(x, cos_sin, plan.rows, memory, choice)
        streams, pre = spread(streams, output, connection), connection.pre
        connection = self._to_experts.connect(streams)
        x = self._norm(collapse(streams, pre), self._experts_norm)
        output = self._experts(x, plan.rows.token_ids)
        return spread(streams, output, connection), connection.pre

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return self._kernels.rms_norm(x, weight, self._eps)


class V41Model:
    """See registry.Model and state_cache.StatefulModel; weights are packed for one kernel set."""

    def __init__(
        self,
        config: DeepseekV41Config,
        weights: Mapping[str, Tensor],
        kernels: Kernels,
        experts: RunExperts,
        *,
        block_size: int,
        max_positions: int,
    ) -> None:
        """Pack the weights.

        Args:
            experts: runs the experts of all layers.
            block_size: positions of a block.
            max_positions: positions that a sequence may reach.

        Raises:
            ModelFileError: a tensor is missing, left over or of the wrong shape.
        """
        self.config = config
        self._kernels, self._block_size = kernels, block_size
        self._states = torch.empty(0, state_bytes(config), dtype=torch.uint8)
        reader = WeightReader(weights, torch.float32, torch.device("cpu"))
        size = (config.vocab_size, config.hidden_size)
        self._embedding = reader.rows("embed.weight", *size)
        self._latest_tokens = LatestTokens(config)
        self._layers = [
            V41Layer(config, kernels, reader, index, experts) for index in range(len(config.layers))
        ]
        self._norm = reader("norm.weight", config.hidden_size)
        self._head = kernels.pack(reader("head.weight", *size))
        self._angles = {
            compressed: angles(config, max_positions, compressed=compressed)
            for compressed in (False, True)
        }
        self.mtp: tuple[Part, ...] = ()
        ignore_mtp(weights, reader)
        _ignore_images(weights, reader)
        reader.check_all_read()

    @property
    def nbytes(self) -> int:
        """Memory of the packed weights in bytes, without those of routed experts."""
        rows = self._embedding.nbytes + self._norm.nbytes + self._head.nbytes
        layers = sum(layer.nbytes for layer in self._layers)
        return rows + layers + self._latest_tokens.nbytes

    @property
    def cache_tensors(self) -> tuple[CacheTensor, ...]:
        """See Model."""
        return cache_tensors(self.config)

    @property
    def state_block(self) -> StateBlock:
        """See StatefulModel: rings hold what is open at any position."""
        return StateBlock(state_bytes(self.config), boundary=1)

    @property
    def state_replay(self) -> StateReplay | None:
        """See StatefulModel: with no group open, the state is the window and the last tokens."""
        config = self.config
        boundary = math.lcm(*(layer.ratio for layer in config.layers if layer.ratio))
        return StateReplay(config.window, boundary, config.engram.longest - 1)

    def use_states(self, slots: Tensor) -> None:
        """See StatefulModel."""
        self._states = slots

    def forward(self, data: InputMetadata, caches: Sequence[Tensor]) -> Tensor:
        """See Model."""
        plan = plan_v41(self.config, data.sequences, data.token_ids, block_size=self._block_size)
        return self.compute(plan, make_memory(self.config, self._states, caches))

    def compute(self, plan: V41Plan, memory: Memory) -> Tensor:
        """Compute all rows of a round and write what is kept of them.

        Returns:
            [T, hidden], before the last norm.
        """
        rows = self._embedding(plan.rows.token_ids)
        tokens = self._latest_tokens(plan, memory.tokens)
        streams = rows.unsqueeze(1).repeat(1, self.config.streams, 1)
        pre = torch.zeros(len(rows), self.config.streams)
        pre[:, 0] = 1  # the first sublayer reads one of the streams, which are still equal
        choice = Choice()
        for layer, kept in zip(self._layers, memory.layers, strict=True):
            cos_sin = self._angles[layer.compressed]
            streams, pre = layer(streams, pre, cos_sin, tokens, plan, kept, choice)
        return collapse(streams, pre)

    def cache(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """See Model."""
        return torch.zeros(shape, dtype=dtype)

    def close(self) -> None:
        """See Model: it has no threads."""

    def logits(self, hidden: Tensor) -> Tensor:
        """[rows, vocabulary] float32, of rows [rows, hidden] that `forward` returned."""
        return self._head(self._kernels.rms_norm(hidden, self._norm, self.config.rms_norm_eps))


def _ignore_images(weights: Mapping[str, Tensor], reader: WeightReader) -> None:
    """Accept the tensors for images unread."""
    names = [name for name in weights if name.startswith(_IMAGES)]
    if names:
        reader.ignore(*names)
        log.info("%d tensors for images are not loaded: only text is served", len(names))
