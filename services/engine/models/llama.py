"""The Llama architecture over paged keys and values (Touvron et al. 2023)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.dispatch import Kernels, Linear
from services.engine.input_metadata import InputMetadata
from services.engine.models.config import ModelConfig, ModelFileError
from services.engine.models.rope import pair_halves, turn_table


@dataclass(frozen=True, slots=True)
class _Layer:
    attention_norm: Tensor
    qkv: Linear
    output: Linear
    mlp_norm: Tensor
    gate_up: Linear
    down: Linear


class LlamaModel:
    """Weights packed for one set of kernels; holds no state of any request."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Mapping[str, Tensor],
        kernels: Kernels,
        *,
        dtype: torch.dtype,
        device: torch.device,
        max_positions: int,
    ) -> None:
        """Pack the weights.

        Args:
            dtype: of activations, keys and values.
            max_positions: positions that a sequence may reach.

        Raises:
            ModelFileError: a tensor is missing, left over or of the wrong shape.
        """
        self.config = config
        self._kernels = kernels
        take = _Taker(weights, dtype, device)
        self._embedding = take("model.embed_tokens.weight", config.vocab_size, config.hidden_size)
        self._layers = [self._pack_layer(take, index) for index in range(config.num_layers)]
        self._norm = take("model.norm.weight", config.hidden_size)
        self._head = kernels.pack(self._head_weight(take))
        self._turns = turn_table(config, max_positions).to(device)
        take.finish()

    @property
    def nbytes(self) -> int:
        """Memory of the weights as packed; a tied embedding counts once."""
        total = self._head.nbytes + self._norm.nbytes
        if not self.config.tie_embeddings or self._head.nbytes != self._embedding.nbytes:
            total += self._embedding.nbytes
        for layer in self._layers:
            linears = (layer.qkv, layer.output, layer.gate_up, layer.down)
            norms = (layer.attention_norm, layer.mlp_norm)
            total += sum(part.nbytes for part in (*linears, *norms))
        return total

    def forward(self, data: InputMetadata, caches: Sequence[Tensor]) -> Tensor:
        """Compute all rows of a round, writing their keys and values.

        Args:
            caches: per layer, [blocks, block, 2 G, D].

        Returns:
            [T, hidden], before the last norm.
        """
        x = self._embedding.index_select(0, data.token_ids)
        turns = self._turns.index_select(0, data.positions)
        for layer, cache in zip(self._layers, caches, strict=True):
            self._attend(layer, x, turns, data, cache)
            self._feed_forward(layer, x)
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """[rows, vocabulary] in float32, of rows that `forward` gave."""
        normed = self._kernels.rms_norm(hidden, self._norm, self.config.rms_norm_eps)
        return self._head(normed).float()

    def _attend(
        self, layer: _Layer, x: Tensor, turns: Tensor, data: InputMetadata, cache: Tensor
    ) -> None:
        config, kernels = self.config, self._kernels
        normed = kernels.rms_norm(x, layer.attention_norm, config.rms_norm_eps)
        qkv = layer.qkv(normed).view(x.shape[0], -1, config.head_dim)
        kernels.rope(qkv[:, : config.num_heads + config.num_kv_heads], turns)
        q, kv = qkv[:, : config.num_heads], qkv[:, config.num_heads :]
        kernels.kv_write(cache, kv, data.slots)
        parts = [kernels.attention(q[g.rows], kv[g.rows], cache, g) for g in data.groups]
        layer.output.add_to(x, parts[0] if len(parts) == 1 else torch.cat(parts))

    def _feed_forward(self, layer: _Layer, x: Tensor) -> None:
        normed = self._kernels.rms_norm(x, layer.mlp_norm, self.config.rms_norm_eps)
        layer.down.add_to(x, self._kernels.silu_mul(layer.gate_up(normed)))

    def _pack_layer(self, take: "_Taker", index: int) -> _Layer:
        config, pack = self.config, self._kernels.pack
        hidden, middle = config.hidden_size, config.intermediate_size
        queries, keys = (n * config.head_dim for n in (config.num_heads, config.num_kv_heads))
        at = f"model.layers.{index}"
        q = take(f"{at}.self_attn.q_proj.weight", queries, hidden)
        k = take(f"{at}.self_attn.k_proj.weight", keys, hidden)
        v = take(f"{at}.self_attn.v_proj.weight", keys, hidden)
        paired = (pair_halves(q, config.num_heads), pair_halves(k, config.num_kv_heads))
        gate = take(f"{at}.mlp.gate_proj.weight", middle, hidden)
        up = take(f"{at}.mlp.up_proj.weight", middle, hidden)
        return _Layer(
            attention_norm=take(f"{at}.input_layernorm.weight", hidden),
            qkv=pack(torch.cat((*paired, v))),
            output=pack(take(f"{at}.self_attn.o_proj.weight", hidden, queries)),
            mlp_norm=take(f"{at}.post_attention_layernorm.weight", hidden),
            gate_up=pack(torch.cat((gate, up))),
            down=pack(take(f"{at}.mlp.down_proj.weight", hidden, middle)),
        )

    def _head_weight(self, take: "_Taker") -> Tensor:
        if self.config.tie_embeddings:
            take.ignore("lm_head.weight")
            return self._embedding
        return take("lm_head.weight", self.config.vocab_size, self.config.hidden_size)


class _Taker:
    """Hands out tensors by name, checked, and knows which were never asked for."""

    def __init__(
        self, weights: Mapping[str, Tensor], dtype: torch.dtype, device: torch.device
    ) -> None:
        self._weights = dict(weights)
        self._dtype = dtype
        self._device = device

    def __call__(self, name: str, *shape: int) -> Tensor:
        tensor = self._weights.pop(name, None)
        if tensor is None:
            raise ModelFileError(f"tensor {name!r} is missing")
        if tuple(tensor.shape) != shape:
            raise ModelFileError(f"tensor {name!r} has shape {tuple(tensor.shape)}, not {shape}")
        return tensor.to(device=self._device, dtype=self._dtype)

    def ignore(self, name: str) -> None:
        self._weights.pop(name, None)

    def finish(self) -> None:
        left = [name for name in self._weights if not name.endswith("rotary_emb.inv_freq")]
        if left:
            raise ModelFileError(f"tensors without a place in the model: {', '.join(left[:5])}")
