"""Dense decoders whose whole round is one compiled job (`kernels.compiled`).

For CPUs, in float32 or int8.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from kernels.compiled.packing import PackedWeight, pack_bytes, pack_floats
from kernels.compiled.pages import Arena, zeros
from kernels.compiled.program import LayerWeights, Program, Shape
from kernels.compiled.tiles import PANEL
from services.engine.compute.models.attention import joined_projection, turned_norm
from services.engine.compute.models.input_metadata import InputMetadata
from services.engine.compute.models.rope import turn_table
from services.engine.compute.models.weights import Taker
from services.engine.contract.model_config import ModelConfig

_EMBEDDING = "model.embed_tokens.weight"


class FusedDecoder:
    """Weights packed for the compiled round; used in the place of `decoder.Decoder`."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Mapping[str, Tensor],
        *,
        head_norms: bool,
        int8: bool,
        block_size: int,
        max_positions: int,
    ) -> None:
        """Pack the weights.

        Raises:
            ModelFileError: a tensor is missing, left over or of the wrong shape.
        """
        self.config = config
        self._packed = pack_bytes if int8 else pack_floats
        self._arena = Arena()
        self._head_norms = head_norms
        take = Taker(weights, torch.float32, torch.device("cpu"))
        self._embedding = take.rows(_EMBEDDING, config.vocab_size, config.hidden_size)
        layers = [self._layer(take, index) for index in range(config.num_layers)]
        norm = take("model.norm.weight", config.hidden_size)
        head = self._pack(self._head_weight(take))
        self._turns = turn_table(config, max_positions)
        take.finish()
        self._layers, self._norm, self._head = layers, norm, head
        self._program = Program(
            Shape(
                hidden=config.hidden_size,
                heads=config.num_heads,
                kv_heads=config.num_kv_heads,
                dim=config.head_dim,
                middle=config.intermediate_size,
                vocabulary=config.vocab_size,
                eps=config.rms_norm_eps,
                block=block_size,
            ),
            layers,
            norm,
            head,
            torch.get_num_threads(),
        )

    @property
    def nbytes(self) -> int:
        """Memory of the weights as packed."""
        total = self._head.nbytes + self._norm.nbytes + self._embedding.nbytes
        for layer in self._layers:
            parts = (getattr(layer, name) for name in LayerWeights.__slots__)
            total += sum(p.nbytes for p in parts if isinstance(p, (Tensor, PackedWeight)))
        return total

    def forward(self, data: InputMetadata, caches: Sequence[Tensor]) -> Tensor:
        """[T, hidden], before the last norm; good until the next call."""
        if data.spans is None:
            raise ValueError("the round was laid out for other kernels")
        turns = self._turns.index_select(0, data.positions)
        x = self._embedding(data.token_ids)
        return self._program.forward(x, turns, data.slots, data.spans, caches)

    def logits(self, hidden: Tensor) -> Tensor:
        """[rows, vocabulary] in float32, of rows that `forward` gave."""
        return self._program.logits(hidden)

    @staticmethod
    def cache(shape: tuple[int, ...]) -> Tensor:
        """Zeros for one layer's keys and values."""
        return zeros(shape, torch.float32)

    def close(self) -> None:
        """End its threads."""
        self._program.close()

    def _pack(self, weight: Tensor) -> PackedWeight:
        packed = self._packed(weight)
        return replace(packed, panels=self._arena.keep(packed.panels))

    def _layer(self, take: Taker, index: int) -> LayerWeights:
        config, at = self.config, f"model.layers.{index}"
        hidden, middle = config.hidden_size, config.intermediate_size
        queries = config.num_heads * config.head_dim
        qkv_bias = gate_up_bias = q_norm = k_norm = None
        if config.qkv_bias:
            qkv_bias = joined_projection(config, take, f"{at}.self_attn", "bias", 1).view(-1)
        if config.mlp_bias:
            names = (f"{at}.mlp.gate_proj.bias", f"{at}.mlp.up_proj.bias")
            gate_up_bias = torch.cat([take(name, middle) for name in names])
        if self._head_norms:
            q_norm, k_norm = (
                turned_norm(take, f"{at}.self_attn.{side}_norm.weight", config.head_dim)
                for side in "qk"
            )
        gate = take(f"{at}.mlp.gate_proj.weight", middle, hidden)
        up = take(f"{at}.mlp.up_proj.weight", middle, hidden)
        down_bias = take.optional(f"{at}.mlp.down_proj.bias", hidden, wanted=config.mlp_bias)
        output_bias = take.optional(
            f"{at}.self_attn.o_proj.bias", hidden, wanted=config.output_bias
        )
        return LayerWeights(
            norm=take(f"{at}.input_layernorm.weight", hidden),
            qkv=self._pack(joined_projection(config, take, f"{at}.self_attn", "weight", hidden)),
            qkv_bias=_padded(qkv_bias),
            output=self._pack(take(f"{at}.self_attn.o_proj.weight", hidden, queries)),
            output_bias=_padded(output_bias),
            norm_2=take(f"{at}.post_attention_layernorm.weight", hidden),
            gate_up=self._pack(torch.cat((gate, up))),
            gate_up_bias=_padded(gate_up_bias),
            down=self._pack(take(f"{at}.mlp.down_proj.weight", hidden, middle)),
            down_bias=_padded(down_bias),
            q_norm=q_norm,
            k_norm=k_norm,
            window=config.sliding_window if index in config.sliding_layers else 0,
        )

    def _head_weight(self, take: Taker) -> Tensor:
        config = self.config
        name = _EMBEDDING if config.tie_embeddings else "lm_head.weight"
        if config.tie_embeddings:
            take.ignore("lm_head.weight")
        return take(name, config.vocab_size, config.hidden_size)


def _padded(bias: Tensor | None) -> Tensor | None:
    return None if bias is None else pad(bias, (0, -bias.shape[0] % PANEL)).contiguous()
