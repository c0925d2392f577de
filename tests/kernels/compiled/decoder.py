"""Small random decoders: as a compiled program, and as plain float64 arithmetic."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import silu

from kernels.compiled.packing import pack_floats
from kernels.compiled.program import Program
from kernels.compiled.rounds import CompiledRounds
from kernels.whole_rounds import DecoderShape, LayerWeights, PackedWeight, RoutedShape, Spans

SMALL = DecoderShape(
    hidden=40, heads=6, kv_heads=2, dim=12, intermediate=70, vocabulary=100, eps=1e-5, block=8
)
LARGE = DecoderShape(
    hidden=96, heads=4, kv_heads=4, dim=32, intermediate=130, vocabulary=257, eps=1e-6, block=32
)
ONE_HEAD = DecoderShape(
    hidden=64, heads=8, kv_heads=1, dim=16, intermediate=64, vocabulary=64, eps=1e-5, block=16
)
ROUTED = replace(
    SMALL,
    hidden=41,  # odd: products of bfloat16 read pairs
    routed=RoutedShape(experts=9, top_k=3, intermediate=27, renormalise=True, layers=2),
)
MIXED = replace(
    LARGE,
    routed=RoutedShape(experts=5, top_k=2, intermediate=50, renormalise=False, layers=1),
)


@dataclass
class Dense:
    """One layer's weights as they are."""

    norm: Tensor
    qkv: Tensor
    output: Tensor
    norm_2: Tensor
    gate_up: Tensor
    down: Tensor
    biases: tuple[Tensor, ...]
    head_norms: tuple[Tensor, ...]
    window: int
    router: Tensor | None = None
    """With it, `gate_up` and `down` have the experts as their first axis."""


def _dense(
    shape: DecoderShape, draw: torch.Generator, window: int, extras: bool, routed: bool
) -> Dense:
    def some(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=draw) / sizes[-1] ** 0.5

    joined = (shape.heads + 2 * shape.kv_heads) * shape.dim
    queries = shape.heads * shape.dim
    sizes = (joined, shape.hidden, 2 * shape.intermediate, shape.hidden)
    feed = (2 * shape.intermediate, shape.hidden), (shape.hidden, shape.intermediate)
    if routed:
        count, size = shape.routed.experts, shape.routed.intermediate
        feed = (count, 2 * size, shape.hidden), (count, shape.hidden, size)
    return Dense(
        norm=1 + some(shape.hidden),
        qkv=some(joined, shape.hidden),
        output=some(shape.hidden, queries),
        norm_2=1 + some(shape.hidden),
        gate_up=some(*feed[0]),
        down=some(*feed[1]),
        biases=tuple(some(size) for size in sizes) if extras else (),
        head_norms=(1 + some(shape.dim), 1 + some(shape.dim)) if extras else (),
        window=window,
        router=3 * some(shape.routed.experts, shape.hidden) if routed else None,
    )


def _packed(layer: Dense, pack=pack_floats) -> LayerWeights:
    biases = list(layer.biases) or [None] * 4
    q_norm, k_norm = layer.head_norms or (None, None)
    rounds, routed = CompiledRounds(pack), layer.router is not None

    def feed(weight: Tensor) -> PackedWeight:
        return rounds.pack_experts(len(weight), lambda e: weight[e]) if routed else pack(weight)

    return LayerWeights(
        norm=layer.norm,
        qkv=pack(layer.qkv),
        qkv_bias=biases[0],
        output=pack(layer.output),
        output_bias=biases[1],
        norm_2=layer.norm_2,
        gate_up=feed(layer.gate_up),
        gate_up_bias=None if routed else biases[2],
        down=feed(layer.down),
        down_bias=None if routed else biases[3],
        q_norm=q_norm,
        k_norm=k_norm,
        window=layer.window,
        router=rounds.pack_router(layer.router) if routed else None,
    )


class Model:
    """Two layers, as a program and as plain arithmetic."""

    def __init__(self, shape: DecoderShape, *, window: int = 0, extras: bool = False) -> None:
        draw = torch.Generator().manual_seed(7)
        self.shape = shape
        routed = shape.routed.layers if shape.routed else 0
        self.layers = [
            _dense(shape, draw, width, extras, index >= 2 - routed)
            for index, width in enumerate((window, 0))
        ]
        self.norm = 1 + torch.randn(shape.hidden, generator=draw) / 9
        self.head = torch.randn(shape.vocabulary, shape.hidden, generator=draw)
        self.angles = torch.rand(400, shape.dim // 2, generator=draw) * 6
        self.embedded = torch.randn(400, shape.hidden, generator=draw)

    def program(self, threads: int = 1, pack=pack_floats) -> Program:
        layers = [_packed(layer, pack) for layer in self.layers]
        return Program(self.shape, layers, self.norm, pack(self.head), threads)

    def caches(self, blocks: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
        shape = self.shape
        size = (blocks, shape.block, 2 * shape.kv_heads, shape.dim)
        return [torch.zeros(size, dtype=dtype) for _ in self.layers]

    def cos_sin(self, positions: list[int]) -> Tensor:
        angles = self.angles[positions]
        return torch.stack((angles.cos(), angles.sin()), dim=-1)

    def plain(self, x: Tensor) -> Tensor:
        """Logits [T, vocabulary] of one sequence from its start, in float64."""
        x = x.double()
        for layer in self.layers:
            x = x + self._attention(layer, x)
            normed = _rms(x, layer.norm_2, self.shape.eps)
            x = x + self._feed_forward(layer, normed)
        return _rms(x, self.norm, self.shape.eps) @ self.head.double().T

    def _feed_forward(self, layer: Dense, normed: Tensor) -> Tensor:
        if layer.router is None:
            gate, up = _linear(normed, layer.gate_up, layer.biases, 2).chunk(2, dim=-1)
            return _linear(silu(gate) * up, layer.down, layer.biases, 3)
        odds, ids = (normed @ layer.router.double().T).softmax(-1).topk(self.shape.routed.top_k)
        if self.shape.routed.renormalise:
            odds = odds / odds.sum(-1, keepdim=True)
        out = torch.zeros_like(normed)
        for row, (own, experts) in enumerate(zip(odds, ids.tolist(), strict=True)):
            for weight, expert in zip(own, experts, strict=True):
                gate, up = (layer.gate_up[expert].double() @ normed[row]).chunk(2)
                out[row] += weight * (layer.down[expert].double() @ (silu(gate) * up))
        return out

    def _attention(self, layer: Dense, x: Tensor) -> Tensor:
        shape, length = self.shape, x.shape[0]
        joined = _linear(_rms(x, layer.norm, shape.eps), layer.qkv, layer.biases, 0)
        heads = joined.view(length, -1, shape.dim)
        q, k, v = heads.split((shape.heads, shape.kv_heads, shape.kv_heads), dim=1)
        if layer.head_norms:
            q, k = (
                _rms(part, weight, shape.eps)
                for part, weight in zip((q, k), layer.head_norms, strict=True)
            )
        cos_sin = torch.view_as_complex(self.cos_sin(list(range(length))).double()).unsqueeze(1)
        q, k = (
            torch.view_as_real(
                torch.view_as_complex(part.reshape(length, -1, shape.dim // 2, 2)) * cos_sin
            ).flatten(2)
            for part in (q, k)
        )
        group = shape.heads // shape.kv_heads
        k, v = (part.repeat_interleave(group, dim=1) for part in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) / shape.dim**0.5
        places = torch.arange(length)
        back = places.view(-1, 1) - places
        hidden = (back < 0) | (back >= layer.window if layer.window else back < 0)
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        mixed = torch.einsum("hqk,khd->qhd", weights, v).reshape(length, -1)
        return _linear(mixed, layer.output, layer.biases, 1)


def _rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


def _linear(x: Tensor, weight: Tensor, biases: tuple[Tensor, ...], which: int) -> Tensor:
    out = x @ weight.double().T
    return out + biases[which].double() if biases else out


class Rounds:
    """Runs sequences of a model, each with blocks of its own."""

    def __init__(
        self,
        model: Model,
        program: Program,
        lengths: list[int],
        cache_dtype: torch.dtype = torch.float32,
    ) -> None:
        self.model, self.program, self.lengths = model, program, lengths
        block = model.shape.block
        counts = [-(-length // block) for length in lengths]
        order = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(3)) + 1
        self.tables = [list(map(int, part)) for part in order.split(counts)]
        self.caches = model.caches(sum(counts) + 1, cache_dtype)

    def embedded(self, seq: int) -> Tensor:
        """Inputs [length, hidden]; no two sequences have the same."""
        return self.model.embedded.roll(-17 * seq, 0)[: self.lengths[seq]]

    def run(self, parts: list[tuple[int, int, int]], *, store: bool = True) -> list[Tensor]:
        """Logits of (sequence, start, end), computed in one round.

        Args:
            store: False: the rows' keys and values go to block 0, which no sequence reads.
        """
        block = self.model.shape.block
        rows, positions, slots, seqs = [], [], [], []
        for seq, start, end in parts:
            seqs.append((len(positions), end - start, start))
            rows.append(self.embedded(seq)[start:end])
            positions += range(start, end)
            table = self.tables[seq]
            slots += [table[p // block] * block + p % block for p in range(start, end)]
        width = max(len(self.tables[seq]) for seq, _, _ in parts)
        tables = [self.tables[seq] + [0] * (width - len(self.tables[seq])) for seq, _, _ in parts]
        hidden = self.program.forward(
            torch.cat(rows),
            self.model.cos_sin(positions),
            torch.tensor(slots) if store else torch.zeros(len(slots), dtype=torch.int64),
            Spans(torch.tensor(seqs), torch.tensor(tables)),
            self.caches,
        )
        logits = self.program.logits(hidden.clone())
        return list(logits.clone().split([end - start for _, start, end in parts]))


CASES = {
    "small": Model(SMALL),
    "large": Model(LARGE, extras=True),
    "one key head": Model(ONE_HEAD),
    "window": Model(SMALL, window=11, extras=True),
    "experts": Model(ROUTED, extras=True),
    "one layer of experts": Model(MIXED),
}
LENGTHS = [45, 1, 17, 70, 8]
