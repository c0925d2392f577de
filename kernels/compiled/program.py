"""A decoder as one compiled job: its weights, its buffers and the tables of `job`."""

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from kernels.compiled import job as j
from kernels.compiled.expert_buffers import ExpertBuffers
from kernels.compiled.packing import pad_outputs, whole_panels
from kernels.compiled.team import Team, address
from kernels.compiled.tiles import ADD, STORE
from kernels.whole_rounds import DecoderShape, LayerWeights, PackedWeight, Spans

_TILE = 32
"""Rows times query heads of an attention tile."""
_MAX_CHUNK = 16
"""Rows that a thread takes at a time, at most."""
_CHUNKS_PER_THREAD = 4
"""Chunks that a phase over rows should have for each thread, so that the load is even."""
_LINE = 16
"""float32 values in a cache line."""


class Program:
    """See kernels.whole_rounds.RoundProgram."""

    def __init__(
        self,
        shape: DecoderShape,
        layers: Sequence[LayerWeights],
        norm: Tensor,
        head: PackedWeight,
        threads: int,
    ) -> None:
        """Make buffers for one row and start the helper threads; see WholeRounds.program."""
        self._shape = shape
        self._layers = tuple(_with_whole_panels(layer) for layer in layers)
        self._head = norm, head
        self._format = _format(head)
        self._team = Team(threads)
        self._table = torch.tensor([_layer_row(layer) for layer in self._layers])
        routers = self._table[:, j.ROUTER] != 0
        self._table[:, j.ROUTED] = torch.where(routers, routers.cumsum(0) - 1, 0)
        self._head_table = torch.tensor([_head_row(norm, head)])
        self._parts = torch.zeros(j.PARTS_PER_LAYER, j.PART_SIZE, dtype=torch.int64)
        self._head_part = torch.zeros(1, j.PART_SIZE, dtype=torch.int64)
        self._constants = torch.tensor([shape.eps, 1 / math.sqrt(shape.dim)])
        group = shape.heads // shape.kv_heads
        self._tile_rows = max(1, _TILE // group)
        # Queries, sums, scores and the two numbers of the softmax state, for each row of a tile;
        # then the keys or the values of a block in float32.
        scratch = self._tile_rows * group * (2 * shape.dim + shape.block + 2)
        scratch += shape.dim * shape.block
        self._scratch = torch.zeros(threads, -(-scratch // _LINE) * _LINE)
        self._experts = ExpertBuffers(shape, self._team.job) if shape.routed else None
        self._rows = 0
        self._inputs: tuple[Tensor, ...] = ()
        self._fill_constants()
        self._grow(1)

    def forward(
        self, x: Tensor, cos_sin: Tensor, slots: Tensor, spans: Spans, caches: Sequence[Tensor]
    ) -> Tensor:
        """See RoundProgram; a cache is [blocks, 2 G, D * block] in the layout of `attention`.

        Raises:
            ValueError: the caches are neither float32 nor bfloat16.
        """
        rows, job = x.shape[0], self._team.job
        self._grow(rows)
        self._x[:rows, : self._shape.hidden] = x
        tiles = self._tiles(spans.seqs)
        self._inputs = (cos_sin, slots, spans.seqs, spans.tables, tiles)  # alive while it runs
        fields = (j.COS_SIN, j.SLOTS, j.SEQS, j.TABLES, j.TILES)
        for field, tensor in zip(fields, self._inputs, strict=True):
            job[field] = tensor.data_ptr()
        job[j.TABLES_STRIDE] = spans.tables.shape[1]
        job[j.TILE_COUNT] = tiles.shape[0]
        job[j.CACHE_BYTES] = _cache_bytes(caches)
        self._table[:, j.CACHE] = torch.tensor([cache.data_ptr() for cache in caches])
        self._run(self._x[:rows], self._table, self._parts)
        return self._x[:rows, : self._shape.hidden]

    def logits(self, hidden: Tensor) -> Tensor:
        """See RoundProgram."""
        rows = hidden.shape[0]
        self._grow(rows)
        hidden = hidden.contiguous()
        vocabulary = self._shape.vocabulary
        out = torch.empty(rows, whole_panels(vocabulary))
        self._head_part[0] = _part_row(hidden.shape[1], vocabulary, out, STORE)
        if rows:
            self._run(hidden, self._head_table, self._head_part)
        return out[:, :vocabulary]

    def expert_rows(self) -> Tensor | None:
        """See RoundProgram."""
        return None if self._experts is None else self._experts.counts

    def close(self) -> None:
        """See RoundProgram."""
        self._team.close()

    def _run(self, x: Tensor, layers: Tensor, parts: Tensor) -> None:
        job, rows = self._team.job, x.shape[0]
        chunks = _CHUNKS_PER_THREAD * int(job[j.THREADS])
        job[j.ROWS], job[j.CHUNK] = rows, max(1, min(_MAX_CHUNK, rows // chunks))
        job[j.X], job[j.X_STRIDE] = x.data_ptr(), x.shape[1]
        job[j.LAYERS], job[j.LAYER_TABLE] = layers.shape[0], layers.data_ptr()
        job[j.PARTS], job[j.PART_TABLE] = parts.shape[0], parts.data_ptr()
        phases = j.ROUTED_PHASES if self._experts else j.PHASES
        self._team.run(phases * layers.shape[0])

    def _tiles(self, seqs: Tensor) -> Tensor:
        counts = seqs[:, 1].tolist()
        tiles = [
            (seq, first)
            for seq, count in enumerate(counts)
            for first in range(0, count, self._tile_rows)
        ]
        return torch.tensor(tiles, dtype=torch.int64)

    def _fill_constants(self) -> None:
        """Fill the fields of the job table that never change."""
        job, shape = self._team.job, self._shape
        values = {
            j.HIDDEN: shape.hidden,
            j.HEADS: shape.heads,
            j.KV_HEADS: shape.kv_heads,
            j.DIM: shape.dim,
            j.INTERMEDIATE: shape.intermediate,
            j.BLOCK: shape.block,
            j.FORMAT: self._format,
            j.TILE_ROWS: self._tile_rows,
            j.SCRATCH: self._scratch.data_ptr(),
            j.SCRATCH_STRIDE: self._scratch.shape[1],
            j.CONSTANTS: self._constants.data_ptr(),
        }
        for field, value in values.items():
            job[field] = value

    def _grow(self, rows: int) -> None:
        """Make buffers for `rows` rows, whole panels wide, if those in use are smaller."""
        if rows <= self._rows:
            return
        shape, job = self._shape, self._team.job
        queries = shape.heads * shape.dim
        qkv = queries + 2 * shape.kv_heads * shape.dim
        narrow = whole_panels(max(shape.hidden, queries, shape.intermediate))
        experts = shape.routed.experts if shape.routed else 0
        wide = whole_panels(max(qkv, 2 * shape.intermediate, experts))
        self._rows = rows
        self._x = torch.zeros(rows, whole_panels(shape.hidden))
        self._work = torch.zeros(rows, narrow)
        self._wide = torch.zeros(rows, wide)
        self._quantized = torch.zeros(rows, narrow, dtype=torch.int8)
        self._scales = torch.zeros(rows)
        self._corrections = torch.zeros(rows, dtype=torch.int32)
        job[j.WORK], job[j.WORK_STRIDE] = self._work.data_ptr(), narrow
        job[j.WIDE], job[j.WIDE_STRIDE] = self._wide.data_ptr(), self._wide.shape[1]
        job[j.QUANTIZED], job[j.QUANTIZED_STRIDE] = self._quantized.data_ptr(), narrow
        job[j.SCALES] = self._scales.data_ptr()
        job[j.CORRECTIONS] = self._corrections.data_ptr()
        if self._experts:
            self._experts.grow(rows)
        self._parts[j.QKV] = _part_row(shape.hidden, qkv, self._wide, STORE)
        self._parts[j.OUTPUT] = _part_row(queries, shape.hidden, self._x, ADD)
        self._parts[j.GATE_UP] = _part_row(shape.hidden, 2 * shape.intermediate, self._wide, STORE)
        self._parts[j.DOWN] = _part_row(shape.intermediate, shape.hidden, self._x, ADD)


def _cache_bytes(caches: Sequence[Tensor]) -> int:
    """Bytes of a value of the caches, which all have the number format of the first one."""
    dtype = caches[0].dtype
    if dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"the caches are {dtype}, they must be float32 or bfloat16")
    return dtype.itemsize


def _format(weight: PackedWeight) -> int:
    if weight.scales is not None:
        return j.BYTES
    return j.HALVES if weight.panels.dtype == torch.bfloat16 else j.FLOATS


def _with_whole_panels(layer: LayerWeights) -> LayerWeights:
    """The layer with its biases padded: compiled code adds whole panels of them."""

    def padded(bias: Tensor | None) -> Tensor | None:
        return None if bias is None else pad_outputs(bias)

    return replace(
        layer,
        qkv_bias=padded(layer.qkv_bias),
        output_bias=padded(layer.output_bias),
        gate_up_bias=padded(layer.gate_up_bias),
        down_bias=padded(layer.down_bias),
    )


def _layer_row(layer: LayerWeights) -> list[int]:
    row = [0] * j.LAYER_SIZE
    row[j.NORM], row[j.NORM_2] = address(layer.norm), address(layer.norm_2)
    row[j.Q_NORM], row[j.K_NORM] = address(layer.q_norm), address(layer.k_norm)
    row[j.WINDOW] = layer.window
    row[j.ROUTER] = address(layer.router.panels if layer.router else None)
    _set_weight(row, j.QKV, layer.qkv, layer.qkv_bias)
    _set_weight(row, j.OUTPUT, layer.output, layer.output_bias)
    _set_weight(row, j.GATE_UP, layer.gate_up, layer.gate_up_bias)
    _set_weight(row, j.DOWN, layer.down, layer.down_bias)
    return row


def _head_row(norm: Tensor, head: PackedWeight) -> list[int]:
    row = [0] * j.LAYER_SIZE
    row[j.NORM] = address(norm)
    _set_weight(row, j.QKV, head, None)
    return row


def _set_weight(row: list[int], part: int, weight: PackedWeight, bias: Tensor | None) -> None:
    first = j.WEIGHTS + j.WEIGHT_SIZE * part
    row[first + j.PANELS] = address(weight.panels)
    row[first + j.PANEL_SCALES] = address(weight.scales)
    row[first + j.BIAS] = address(bias)


def _part_row(columns: int, outputs: int, target: Tensor, mode: int) -> Tensor:
    row = [0] * j.PART_SIZE
    row[j.COLUMNS], row[j.OUTPUTS], row[j.MODE] = columns, outputs, mode
    row[j.TARGET], row[j.TARGET_STRIDE] = target.data_ptr(), target.shape[1]
    return torch.tensor(row)
