"""A DeepSeek V4 decoder: embedding, layers on several residual streams, head.

It reads the published tensor names and computes in float32. What is kept of a request is in the
engine's blocks and slots, of which `memory.py` makes views.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from kernels.interface import Kernels
from services.engine.compute.models.architectures.deepseek import V4_DRAFT_EXPERTS, V4_EXPERTS
from services.engine.compute.models.cache_tensors import CacheTensor
from services.engine.compute.models.input_metadata import InputMetadata
from services.engine.compute.models.moe import RunExperts
from services.engine.compute.models.mtp import KeptMtp, total_bytes
from services.engine.compute.models.v4_modules.attention import V4Attention
from services.engine.compute.models.v4_modules.experts import V4FeedForward
from services.engine.compute.models.v4_modules.hyper_connections import (
    HyperConnection,
    StreamHead,
    collapse,
    spread,
)
from services.engine.compute.models.v4_modules.memory import (
    LayerMemory,
    cache_tensors,
    layer_memories,
    state_bytes,
)
from services.engine.compute.models.v4_modules.rotary import angles
from services.engine.compute.models.v4_modules.round_plan import RoundPlan, plan_round
from services.engine.compute.models.weights import WeightReader
from services.engine.contract.deepseek_v4 import DeepseekV4Config
from services.engine.contract.deepseek_v4 import V4Layer as LayerKind
from services.engine.contract.runner import SequenceMetadata, StateBlock, StateReplay


def plan_v4(
    config: DeepseekV4Config,
    requests: Sequence[SequenceMetadata],
    token_ids: Tensor,
    *,
    block_size: int,
    drafts: int = 0,
) -> RoundPlan:
    """Lay out one round of a V4 model; see `plan_round`."""
    spans = {layer.ratio: layer.span for layer in config.layers if layer.ratio}
    return plan_round(
        requests,
        token_ids,
        window=config.window,
        spans=spans,
        block_size=block_size,
        drafts=drafts,
    )


class V4Layer:
    """One layer: two sublayers, each connected to the streams in its own way."""

    def __init__(
        self,
        config: DeepseekV4Config,
        kernels: Kernels,
        reader: WeightReader,
        index: int,
        experts: RunExperts,
        *,
        drafts: bool = False,
    ) -> None:
        """Pack the weights of the layer, or of the one that drafts tokens with this number.

        Raises:
            ModelFileError: a tensor is missing or of the wrong shape.
        """
        names = V4_DRAFT_EXPERTS if drafts else V4_EXPERTS
        at, kind = f"{names.layers}.{index}", LayerKind() if drafts else config.layers[index]
        self._kernels, self._eps = kernels, config.rms_norm_eps
        self.compressed = kind.ratio > 0
        self._to_attention = HyperConnection(config, kernels, reader, f"{at}.hc_attn")
        self._attention_norm = reader(f"{at}.attn_norm.weight", config.hidden_size)
        self._attention = V4Attention(config, kernels, reader, f"{at}.attn", kind)
        self._to_experts = HyperConnection(config, kernels, reader, f"{at}.hc_ffn")
        self._experts_norm = reader(f"{at}.ffn_norm.weight", config.hidden_size)
        self._experts = V4FeedForward(
            config, kernels, reader, index, experts, hashed=kind.hashed, names=names
        )

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


class V4Mtp:
    """A layer that drafts tokens: it reads all streams, and the next token's embedding."""

    def __init__(
        self,
        config: DeepseekV4Config,
        kernels: Kernels,
        reader: WeightReader,
        number: int,
        kept: KeptMtp,
    ) -> None:
        """Pack the weights of the layer whose tensors begin with `mtp` and its number.

        Raises:
            ModelFileError: a tensor is missing or of the wrong shape.
        """
        assert kept.experts is not None, "DeepSeek V4 has experts in every layer"
        at, hidden = f"mtp.{number}", config.hidden_size
        self.embedding_norm = reader(f"{at}.enorm.weight", hidden)
        self.hidden_norm = reader(f"{at}.hnorm.weight", hidden)
        self.from_embedding = kernels.pack(reader(f"{at}.e_proj.weight", hidden, hidden))
        self.from_stream = kernels.pack(reader(f"{at}.h_proj.weight", hidden, hidden))
        self.layer = V4Layer(config, kernels, reader, number, kept.experts, drafts=True)
        self.join = StreamHead(config, kernels, reader, f"{at}.hc_head")
        self.norm = reader(f"{at}.norm.weight", hidden)

    @property
    def nbytes(self) -> int:
        """Memory of the packed weights in bytes, without those of routed experts."""
        norms = (self.embedding_norm, self.hidden_norm, self.norm)
        return total_bytes((*norms, self.from_embedding, self.from_stream, self.layer, self.join))


class V4Model:
    """See registry.Model and state_cache.StatefulModel; weights are packed for one kernel set."""

    def __init__(
        self,
        config: DeepseekV4Config,
        weights: Mapping[str, Tensor],
        kernels: Kernels,
        experts: RunExperts,
        *,
        block_size: int,
        max_positions: int,
        mtp: KeptMtp | None = None,
    ) -> None:
        """Pack the weights.

        Args:
            experts: runs the experts of all layers.
            mtp: the layers that draft tokens; None: those of the files are not read.
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
        self._layers = [
            V4Layer(config, kernels, reader, index, experts) for index in range(len(config.layers))
        ]
        self._join = StreamHead(config, kernels, reader, "hc_head")
        self._norm = reader("norm.weight", config.hidden_size)
        self._head = kernels.pack(reader("head.weight", *size))
        self._angles = {
            compressed: angles(config, max_positions, compressed=compressed)
            for compressed in (False, True)
        }
        self.mtp: tuple[V4Mtp, ...] = ()
        self._draft_expert_bytes = mtp.expert_bytes if mtp else 0
        if mtp is not None:
            self.mtp = tuple(V4Mtp(config, kernels, reader, n, mtp) for n in mtp.numbers)
        else:
            ignore_mtp(weights, reader)
        reader.check_all_read()

    @property
    def nbytes(self) -> int:
        """Memory of the packed weights in bytes, without those of routed experts."""
        rows = self._embedding.nbytes + self._norm.nbytes + self._head.nbytes
        layers = total_bytes(self._layers) + total_bytes(self.mtp) + self._draft_expert_bytes
        return rows + layers + self._join.nbytes

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
        """See StatefulModel: entries overlap, so open groups cannot be rebuilt from a window."""
        return None

    def use_states(self, slots: Tensor) -> None:
        """See StatefulModel."""
        self._states = slots

    def forward(self, data: InputMetadata, caches: Sequence[Tensor]) -> Tensor:
        """See Model."""
        plan = plan_v4(self.config, data.sequences, data.token_ids, block_size=self._block_size)
        return self.compute(plan, layer_memories(self.config, self._states, caches))

    def compute(self, plan: RoundPlan, memories: Sequence[LayerMemory]) -> Tensor:
        """Compute all rows of a round and write what is kept of them.

        Args:
            memories: one per layer.

        Returns:
            [T, hidden], before the last norm.
        """
        rows = self._embedding(plan.token_ids)
        streams = rows.unsqueeze(1).repeat(1, self.config.streams, 1)
        for layer, kept in zip(self._layers, memories, strict=True):
            streams = layer(streams, self._angles[layer.compressed], plan, kept)
        return self._join(streams)

    def cache(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """See Model."""
        return torch.zeros(shape, dtype=dtype)

    def close(self) -> None:
        """See Model: it has no threads."""

    def logits(self, hidden: Tensor) -> Tensor:
        """[rows, vocabulary] float32, of rows [rows, hidden] that `forward` returned."""
        return self._head(self._kernels.rms_norm(hidden, self._norm, self.config.rms_norm_eps))


def ignore_mtp(weights: Mapping[str, Tensor], reader: WeightReader) -> None:
    """Accept the layers that draft tokens unread."""
    reader.ignore_drafts([name for name in weights if name.startswith("mtp.")])
