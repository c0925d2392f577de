"""Decoders whose whole round runs as one job of the kernel set (`kernels.whole_rounds`).

`FusedDecoder` takes the place of `decoder.Decoder` where the chosen kernel set declares
`whole_rounds`. It packs the weights for the set's program, and looks up embeddings and angles.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.whole_rounds import (
    DecoderShape,
    LayerWeights,
    PackedWeight,
    RoutedShape,
    WholeRounds,
)
from services.engine.compute.models.attention import joined_projection, paired_norm
from services.engine.compute.models.cache_tensors import CacheTensor, keys_and_values
from services.engine.compute.models.expert_weights import expert_names
from services.engine.compute.models.input_metadata import InputMetadata
from services.engine.compute.models.kept_weights import KeptWeights
from services.engine.compute.models.rope import cos_sin_table
from services.engine.compute.models.weights import EMBEDDING, HEAD, WeightReader, head_weight
from services.engine.contract.model_config import ModelConfig

CountRows = Callable[[Tensor], None]
"""Takes the rows of each expert in a round, [layers with experts, experts] int64, to be copied."""


class FusedDecoder:
    """See registry.Model; its weights are packed for one program."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Mapping[str, Tensor],
        rounds: WholeRounds,
        *,
        head_norms: bool,
        block_size: int,
        max_positions: int,
        table_dtype: torch.dtype = torch.float32,
        count_rows: CountRows | None = None,
        kept: KeptWeights | None = None,
    ) -> None:
        """Pack the weights and make the program.

        Args:
            head_norms: queries and keys are normed per head before they are rotated.
            block_size: positions of a KV-cache block.
            max_positions: positions that a sequence may reach.
            table_dtype: number format of the embeddings; the round computes in float32.
            count_rows: is given the rows of each expert after each round.
            kept: the packed weights of earlier starts; those that it lacks are kept for later ones.

        Raises:
            ModelFileError: a tensor is missing, left over or of the wrong shape.
        """
        self.config = config
        self._rounds = rounds
        self._head_norms = head_norms
        self._count_rows = count_rows
        self._kept = kept or KeptWeights(None)
        reader = WeightReader(weights, torch.float32, torch.device("cpu"))
        table = WeightReader(weights, table_dtype, torch.device("cpu"))
        self._embedding = table.rows(EMBEDDING, config.vocab_size, config.hidden_size)
        reader.ignore(EMBEDDING)
        self._layers = [self._read_layer(reader, index) for index in range(config.num_layers)]
        self._norm = reader("model.norm.weight", config.hidden_size)
        head_name = EMBEDDING if config.tie_embeddings else HEAD
        self._head = self._packed(reader, "head", [head_name], lambda: head_weight(reader, config))
        if config.tie_embeddings:
            reader.ignore(HEAD)
        self._cos_sin = cos_sin_table(config, max_positions)
        reader.check_all_read()
        self._kept.save()
        shape = DecoderShape(
            hidden=config.hidden_size,
            heads=config.num_heads,
            kv_heads=config.num_kv_heads,
            dim=config.head_dim,
            intermediate=config.intermediate_size,
            vocabulary=config.vocab_size,
            eps=config.rms_norm_eps,
            block=block_size,
            routed=_routed_shape(config),
        )
        threads = torch.get_num_threads()
        self._program = rounds.program(shape, self._layers, self._norm, self._head, threads)

    mtp = ()
    """See Model: none of these architectures has such layers."""

    @property
    def nbytes(self) -> int:
        """See Model."""
        total = self._head.nbytes + self._norm.nbytes + self._embedding.nbytes
        for layer in self._layers:
            parts = (getattr(layer, name) for name in LayerWeights.__slots__)
            total += sum(p.nbytes for p in parts if isinstance(p, (Tensor, PackedWeight)))
        return total

    def forward(self, data: InputMetadata, caches: Sequence[Tensor]) -> Tensor:
        """See Model; the result is valid until the next call."""
        if data.spans is None:
            raise ValueError("spans is None: build_input needs whole_rounds=True for this model")
        cos_sin = self._cos_sin.index_select(0, data.positions)
        x = self._embedding(data.token_ids)
        hidden = self._program.forward(x, cos_sin, data.slots, data.spans, caches)
        expert_rows = self._program.expert_rows()
        if expert_rows is not None and self._count_rows is not None:
            self._count_rows(expert_rows)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """See Model."""
        return self._program.logits(hidden)

    @property
    def cache_tensors(self) -> tuple[CacheTensor, ...]:
        """See Model; the order of the values within a tensor is the program's."""
        return keys_and_values(self.config, self._rounds.cache_dtype)

    def cache(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """See Model; the program chooses the memory, in its one number format."""
        return self._rounds.cache(shape)

    def close(self) -> None:
        """See Model: end the program's threads."""
        self._program.close()

    def _packed(
        self, reader: WeightReader, name: str, parts: Sequence[str], read: Callable[[], Tensor]
    ) -> PackedWeight:
        """A packed weight: the kept one, else one made of tensors `parts`, which `read` joins."""
        return self._kept_or_made(reader, name, parts, lambda: self._rounds.pack(read()))

    def _kept_or_made(
        self,
        reader: WeightReader,
        name: str,
        parts: Iterable[str],
        make: Callable[[], PackedWeight],
    ) -> PackedWeight:
        if self._kept.complete:
            reader.ignore(*parts)
            return self._kept.load(name)
        return self._kept.add(name, make())

    def _read_layer(self, reader: WeightReader, index: int) -> LayerWeights:
        config, at = self.config, f"model.layers.{index}"
        hidden = config.hidden_size
        queries = config.num_heads * config.head_dim
        qkv_bias = q_norm = k_norm = None
        if config.qkv_bias:
            qkv_bias = joined_projection(config, reader, f"{at}.self_attn", "bias", 1).view(-1)
        if self._head_norms:
            q_norm, k_norm = (
                paired_norm(reader, f"{at}.self_attn.{side}_norm.weight", config.head_dim)
                for side in "qk"
            )
        names = [f"{at}.self_attn.{name}_proj" for name in "qkv"]
        output_name = f"{at}.self_attn.o_proj"
        routed = config.moe is not None and index in config.moe.layers
        feed = self._read_experts(reader, index) if routed else self._read_dense(reader, at)
        return LayerWeights(
            norm=reader(f"{at}.input_layernorm.weight", hidden),
            qkv=self._packed(
                reader,
                names[0],
                [f"{name}.weight" for name in names],
                lambda: joined_projection(config, reader, f"{at}.self_attn", "weight", hidden),
            ),
            qkv_bias=qkv_bias,
            output=self._packed_alone(reader, output_name, hidden, queries),
            output_bias=reader.optional(f"{output_name}.bias", hidden, wanted=config.output_bias),
            norm_2=reader(f"{at}.post_attention_layernorm.weight", hidden),
            gate_up=feed.gate_up,
            gate_up_bias=feed.gate_up_bias,
            down=feed.down,
            down_bias=feed.down_bias,
            q_norm=q_norm,
            k_norm=k_norm,
            window=config.sliding_window if index in config.sliding_layers else 0,
            router=feed.router,
        )

    def _read_dense(self, reader: WeightReader, at: str) -> "_FeedForward":
        config = self.config
        hidden, size = config.hidden_size, config.intermediate_size
        joined = [f"{at}.mlp.gate_proj", f"{at}.mlp.up_proj"]
        down_name = f"{at}.mlp.down_proj"
        bias = None
        if config.mlp_bias:
            bias = torch.cat([reader(f"{name}.bias", size) for name in joined])
        return _FeedForward(
            gate_up=self._packed(
                reader,
                joined[0],
                [f"{name}.weight" for name in joined],
                lambda: torch.cat([reader(f"{name}.weight", size, hidden) for name in joined]),
            ),
            gate_up_bias=bias,
            down=self._packed_alone(reader, down_name, hidden, size),
            down_bias=reader.optional(f"{down_name}.bias", hidden, wanted=config.mlp_bias),
        )

    def _read_experts(self, reader: WeightReader, index: int) -> "_FeedForward":
        moe, hidden, at = self.config.moe, self.config.hidden_size, f"model.layers.{index}.mlp"
        assert moe is not None, "a dense layer was read as one with experts"
        count, size = moe.num_experts, moe.intermediate_size
        names = [expert_names(index, expert) for expert in range(count)]

        def gate_up(expert: int) -> Tensor:
            return torch.cat([reader(name, size, hidden) for name in names[expert][:2]])

        def down(expert: int) -> Tensor:
            return reader(names[expert][2], hidden, size)

        def packed(name: str, read: Callable[[int], Tensor]) -> PackedWeight:
            parts = (part for own in names for part in own)
            return self._kept_or_made(
                reader, name, parts, lambda: self._rounds.pack_experts(count, read)
            )

        router = self._rounds.pack_router(reader(f"{at}.gate.weight", count, hidden))
        return _FeedForward(
            gate_up=packed(f"{at}.experts.gate_up", gate_up),
            down=packed(f"{at}.experts.down", down),
            router=router,
        )

    def _packed_alone(
        self, reader: WeightReader, name: str, rows: int, columns: int
    ) -> PackedWeight:
        weight = f"{name}.weight"
        return self._packed(reader, name, [weight], lambda: reader(weight, rows, columns))


@dataclass(frozen=True, slots=True)
class _FeedForward:
    """The second half of a layer; see LayerWeights."""

    gate_up: PackedWeight
    down: PackedWeight
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    router: PackedWeight | None = None


def _routed_shape(config: ModelConfig) -> RoutedShape | None:
    moe = config.moe
    if moe is None:
        return None
    return RoutedShape(
        experts=moe.num_experts,
        top_k=moe.top_k,
        intermediate=moe.intermediate_size,
        renormalise=moe.norm_topk_prob,
        layers=len(moe.layers),
    )
