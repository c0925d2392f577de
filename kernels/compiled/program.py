"""A whole decoder as one compiled job: its packed weights, its buffers and the job's table."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.compiled import job as j
from kernels.compiled.packing import PackedWeight
from kernels.compiled.team import Team, address
from kernels.compiled.tiles import ADD, PANEL, STORE
from kernels.interface import Spans

_TILE = 32
"""Rows times query heads that attend together."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a dense decoder, in elements."""

    hidden: int
    heads: int
    kv_heads: int
    dim: int
    middle: int
    vocabulary: int
    eps: float
    block: int


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """Of one layer; biases are padded to whole panels."""

    norm: Tensor
    qkv: PackedWeight
    qkv_bias: Tensor | None
    output: PackedWeight
    output_bias: Tensor | None
    norm_2: Tensor
    gate_up: PackedWeight
    gate_up_bias: Tensor | None
    down: PackedWeight
    down_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    window: int


class Program:
    """Owns buffers and threads; one round at a time."""

    def __init__(
        self,
        shape: Shape,
        layers: Sequence[LayerWeights],
        norm: Tensor,
        head: PackedWeight,
        threads: int,
    ) -> None:
        self._shape = shape
        self._layers = tuple(layers)
        self._head = norm, head
        self._bytes = head.scales is not None
        self._team = Team(threads)
        self._table = torch.tensor([_layer_row(layer) for layer in layers], dtype=torch.int64)
        self._head_table = torch.zeros(1, j.LAYER_SIZE, dtype=torch.int64)
        self._head_table[0, j.NORM] = address(norm)
        self._head_table[0, j.WEIGHTS : j.WEIGHTS + 2] = torch.tensor(
            [address(head.panels), address(head.scales)]
        )
        self._parts = torch.zeros(4, j.PART_SIZE, dtype=torch.int64)
        self._head_part = torch.zeros(1, j.PART_SIZE, dtype=torch.int64)
        self._constants = torch.tensor([shape.eps, 1 / math.sqrt(shape.dim)])
        group = shape.heads // shape.kv_heads
        self._tile_rows = max(1, _TILE // group)
        wide = self._tile_rows * group * (2 * shape.dim + shape.block + 2)
        self._scratch = torch.zeros(threads, -(-wide // 16) * 16)
        self._rows = 0
        self._keep: list[Tensor] = []
        self._fill_job(threads)
        self._grow(1)

    def forward(
        self, x: Tensor, turns: Tensor, slots: Tensor, spans: Spans, caches: Sequence[Tensor]
    ) -> Tensor:
        """All layers.

        Args:
            x: [T, hidden] float32 embeddings.
            turns: [T, dim / 2, 2] cosines and sines.
            slots: [T] int64.
            caches: per layer, as many float32 as blocks * block * 2 G * D.

        Returns:
            [T, hidden], before the last norm; good until the next call.
        """
        rows, job = x.shape[0], self._team.job
        self._grow(rows)
        self._x[:rows, : self._shape.hidden] = x
        tiles = self._tiles(spans.seqs)
        self._keep = [turns, slots, spans.seqs, spans.tables, tiles]
        self._table[:, j.CACHE] = torch.tensor([cache.data_ptr() for cache in caches])
        places = (j.TURNS, j.SLOTS, j.SEQS, j.TABLES, j.TILES)
        for place, tensor in zip(places, self._keep, strict=True):
            job[place] = tensor.data_ptr()
        job[j.TABLES_STRIDE] = spans.tables.shape[1]
        job[j.TILE_COUNT] = tiles.shape[0]
        job[j.ROWS] = rows
        job[j.X], job[j.X_STRIDE] = self._x.data_ptr(), self._x.shape[1]
        self._run(self._table, self._parts)
        return self._x[:rows, : self._shape.hidden]

    def logits(self, hidden: Tensor) -> Tensor:
        """[rows, vocabulary] of rows that `forward` gave."""
        rows, job = hidden.shape[0], self._team.job
        self._grow(rows)
        hidden = hidden.contiguous()
        vocabulary = self._shape.vocabulary
        out = torch.empty(rows, vocabulary + -vocabulary % PANEL)
        job[j.ROWS] = rows
        job[j.X], job[j.X_STRIDE] = hidden.data_ptr(), hidden.shape[1]
        self._head_part[0] = torch.tensor(
            [hidden.shape[1], vocabulary, out.data_ptr(), out.shape[1], STORE]
        )
        if rows:
            self._run(self._head_table, self._head_part)
        return out[:, :vocabulary]

    def close(self) -> None:
        """End the helping threads; what is called later runs on one."""
        self._team.close()

    def _run(self, layers: Tensor, parts: Tensor) -> None:
        job = self._team.job
        job[j.CHUNK] = max(1, min(16, int(job[j.ROWS]) // (4 * int(job[j.THREADS]))))
        job[j.LAYERS], job[j.LAYER_TABLE] = layers.shape[0], layers.data_ptr()
        job[j.PARTS], job[j.PART_TABLE] = parts.shape[0], parts.data_ptr()
        self._team.run(j.PHASES * layers.shape[0])

    def _tiles(self, seqs: Tensor) -> Tensor:
        counts = seqs[:, 1].tolist()
        return torch.tensor(
            [
                (seq, first)
                for seq, count in enumerate(counts)
                for first in range(0, count, self._tile_rows)
            ],
            dtype=torch.int64,
        )

    def _fill_job(self, threads: int) -> None:
        job, shape = self._team.job, self._shape
        job[j.LAYERS] = len(self._layers)
        job[j.HIDDEN], job[j.HEADS], job[j.KV_HEADS] = shape.hidden, shape.heads, shape.kv_heads
        job[j.MIDDLE], job[j.DIM], job[j.BLOCK], job[j.BYTES] = (
            shape.middle,
            shape.dim,
            shape.block,
            self._bytes,
        )
        job[j.TILE_ROWS] = self._tile_rows
        job[j.SCRATCH] = self._scratch.data_ptr()
        job[j.SCRATCH_STRIDE] = self._scratch.shape[1]
        job[j.CONSTANTS] = self._constants.data_ptr()

    def _grow(self, rows: int) -> None:
        """Buffers for so many rows, whole panels wide."""
        if rows <= self._rows:
            return
        shape, job = self._shape, self._team.job
        queries = shape.heads * shape.dim
        narrow = max(shape.hidden, queries, shape.middle)
        wide = max(queries + 2 * shape.kv_heads * shape.dim, 2 * shape.middle)
        self._rows = rows
        self._x = torch.zeros(rows, _whole(shape.hidden))
        self._work = torch.zeros(rows, _whole(narrow))
        self._wide = torch.zeros(rows, _whole(wide))
        self._levels = torch.zeros(rows, _whole(narrow), dtype=torch.int8)
        self._scales = torch.zeros(rows)
        self._corrections = torch.zeros(rows, dtype=torch.int32)
        job[j.WORK], job[j.WORK_STRIDE] = self._work.data_ptr(), self._work.shape[1]
        job[j.WIDE], job[j.WIDE_STRIDE] = self._wide.data_ptr(), self._wide.shape[1]
        job[j.LEVELS], job[j.LEVELS_STRIDE] = self._levels.data_ptr(), self._levels.shape[1]
        job[j.SCALES] = self._scales.data_ptr()
        job[j.CORRECTIONS] = self._corrections.data_ptr()
        to_wide = self._wide.data_ptr(), self._wide.shape[1], STORE
        to_x = self._x.data_ptr(), self._x.shape[1], ADD
        joined = queries + 2 * shape.kv_heads * shape.dim
        self._parts[j.QKV] = torch.tensor([shape.hidden, joined, *to_wide])
        self._parts[j.OUTPUT] = torch.tensor([queries, shape.hidden, *to_x])
        self._parts[j.GATE_UP] = torch.tensor([shape.hidden, 2 * shape.middle, *to_wide])
        self._parts[j.DOWN] = torch.tensor([shape.middle, shape.hidden, *to_x])


def _whole(count: int) -> int:
    return count + -count % PANEL


def _layer_row(layer: LayerWeights) -> list[int]:
    row = [0] * j.LAYER_SIZE
    packed = (
        (j.QKV, layer.qkv, layer.qkv_bias),
        (j.OUTPUT, layer.output, layer.output_bias),
        (j.GATE_UP, layer.gate_up, layer.gate_up_bias),
        (j.DOWN, layer.down, layer.down_bias),
    )
    for part, weight, bias in packed:
        place = j.WEIGHTS + 3 * part
        row[place : place + 3] = address(weight.panels), address(weight.scales), address(bias)
    row[j.NORM], row[j.NORM_2] = address(layer.norm), address(layer.norm_2)
    row[j.Q_NORM], row[j.K_NORM] = address(layer.q_norm), address(layer.k_norm)
    row[j.WINDOW] = layer.window
    return row
