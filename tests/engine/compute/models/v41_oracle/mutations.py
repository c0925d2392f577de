"""Each formula of the oracle broken, one by one: a golden value that misses one proves nothing.

What the first site of all reads is not among them: its streams are equal, and a norm follows, so
that every choice gives the same.

A mutation is the module, the function's name, and a function that makes the broken one of it.
"""

from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import torch

from tests.engine.compute.models.v41_oracle import (
    attention,
    compressor,
    engram,
    experts,
    formats,
    selection,
    streams,
)

Broken = Callable[[Callable[..., Any]], Callable[..., Any]]


def _same(*_: Any) -> Any:
    """Leave the first argument as it is."""
    return lambda x, *_more: x


def _changed(index: int, change: Callable[[Any], Any]) -> Broken:
    """The function with one positional argument changed."""

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def broken(*args: Any, **named: Any) -> Any:
            given = list(args)
            given[index] = change(given[index])
            return original(*given, **named)

        return broken

    return make


def _after(change: Callable[[Any], Any]) -> Broken:
    """The function with its result changed."""
    return lambda original: lambda *args, **named: change(original(*args, **named))


def _unsigned(original: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x, positions, table, sign=1: original(x, positions, table, 1)


def _half_split(_: Callable[..., Any]) -> Callable[..., Any]:
    """Pairs (i, i + half) instead of adjacent ones."""

    def rotated(x: Any, positions: Any, table: Any, sign: int = 1) -> Any:
        angles = positions.to(torch.float64)[:, None] * table
        while angles.dim() < x.dim():
            angles = angles.unsqueeze(1)
        cos, sin = angles.cos().to(x.dtype), sign * angles.sin().to(x.dtype)
        still, moved = x[..., : -2 * len(table)], x[..., -2 * len(table) :]
        a, b = moved.chunk(2, -1)
        return torch.cat([still, a * cos - b * sin, a * sin + b * cos], -1)

    return rotated


def _own(_: Callable[..., Any]) -> Callable[..., Any]:
    return lambda before, own: own.collapse


def _not_turned(_: Callable[..., Any]) -> Callable[..., Any]:
    def expanded(rows: Any, output: Any, site: Any) -> Any:
        moved = torch.einsum("tjk,tkd->tjd", site.between, rows)
        return site.expand[..., None] * output[:, None] + moved

    return expanded


def _unpinned(_: Callable[..., Any]) -> Callable[..., Any]:
    def candidates(score: Any, seen: Any, blocks: int, size: int) -> Any:
        count = score.shape[1]
        hidden = score.masked_fill(~seen, float("-inf"))
        padded = torch.nn.functional.pad(hidden, (0, -count % size), value=float("-inf"))
        worth = padded.unflatten(-1, (-1, size)).amax(-1)
        chosen = selection.best(worth, worth > float("-inf"), blocks)
        return chosen.repeat_interleave(size, 1)[:, :count] & seen

    return candidates


def _no_relu(_: Callable[..., Any]) -> Callable[..., Any]:
    return lambda queries, keys, each: torch.einsum("thd,gd,th->tg", queries, keys, each)


def _added(shape: Any, layer: int, compressed: Any, newest_first: Any) -> list[int]:
    """n-grams mixed by sums instead of exclusive or."""
    factors = engram.multipliers(shape, layer, max(compressed) + 1)
    found, offset = [], 0
    mixed = newest_first[0] * factors[0]
    for back, heads in enumerate(engram.primes(shape)[layer], start=1):
        mixed += newest_first[back] * factors[back]
        for prime in heads:
            found.append(mixed % prime + offset)
            offset += prime
    return found


def _even(original: Callable[..., Any]) -> Callable[..., Any]:
    """Multipliers that are not made odd."""
    return lambda *args: [number - 1 for number in original(*args)]


def _mean(_: Callable[..., Any]) -> Callable[..., Any]:
    return lambda values, gates: values.mean(1)


MUTATIONS: Mapping[str, tuple[ModuleType, str, Broken]] = {
    "norm without weight": (formats, "normed", lambda o: lambda x, eps, w=None: o(x, eps)),
    "rotation by halves": (formats, "rotated", _half_split),
    "output not turned back": (formats, "rotated", _unsigned),
    "rotation without YaRN": (
        formats,
        "compress_frequencies",
        lambda o: formats.main_frequencies,
    ),
    "main rotation in compressed layers": (
        formats,
        "frequencies",
        lambda o: lambda shape, ratio: formats.main_frequencies(shape),
    ),
    "window not quantised": (formats, "window_values", _same),
    "entries not quantised": (formats, "entry_values", _same),
    "index not quantised": (formats, "index_values", _same),
    "entries with power-of-two scales": (
        formats,
        "entry_values",
        lambda o: (
            lambda x: formats._by_block(
                x, 16, lambda big: formats.power_of_two_scale(big, 6.0), formats.e2m1
            )
        ),
    ),
    "group by its mean": (compressor, "pooled", _mean),
    "group turned by its last position": (compressor, "entries", _changed(2, lambda p: p + 1)),
    "index key not turned": (compressor, "index_keys", _changed(4, torch.zeros_like)),
    "group seen one row late": (compressor, "visible", _changed(0, lambda p: p - 1)),
    "index without ReLU": (selection, "scores", _no_relu),
    "index without head weights": (selection, "scores", _changed(2, torch.ones_like)),
    "index query not turned": (selection, "index_queries", _changed(4, torch.zeros_like)),
    "one entry fewer": (selection, "best", _changed(2, lambda count: count - 1)),
    "newest block not pinned": (selection, "candidates", _unpinned),
    "no candidates": (selection, "candidates", lambda o: lambda s, seen, *_: seen),
    "window one too long": (attention, "in_window", _changed(2, lambda window: window + 1)),
    "no sink": (attention, "probabilities", _changed(2, lambda s: torch.full_like(s, -99.0))),
    "query heads normed": (attention, "queries", _after(lambda q: formats.normed(q, 1e-6))),
    "output groups swapped": (attention, "projected", _changed(3, lambda h: h.flip(1))),
    "collapse of the own site": (streams, "collapse_of", _own),
    "one Sinkhorn round": (streams, "balanced", _changed(1, lambda rounds: 1)),
    "Sinkhorn ends with rows": (streams, "balanced", _after(lambda c: c / c.sum(-1, True))),
    "streams mixed the other way": (streams, "expanded", _not_turned),
    "sigmoid router": (experts, "router_scores", lambda o: torch.sigmoid),
    "router without bias": (experts, "choice", _changed(1, torch.zeros_like)),
    "shares not normed": (
        experts,
        "shares",
        lambda o: lambda score, chosen, factor: score.gather(1, chosen) * factor,
    ),
    "experts not clamped": (experts, "gated", _changed(2, lambda limit: 1e9)),
    "gate and other side swapped": (
        experts,
        "gated",
        lambda o: lambda gate, up, limit: o(up, gate, limit),
    ),
    "look-back goes round": (
        engram,
        "look_back",
        lambda o: lambda ids, p, n, pad: [ids[p - back] for back in range(n)],
    ),
    "sums instead of exclusive or": (engram, "rows_of", lambda o: _added),
    "even multipliers": (engram, "multipliers", _even),
    "multipliers of another layer": (engram, "multipliers", _changed(1, lambda n: n + 1)),
    "gate without root": (
        engram,
        "gate",
        _after(lambda g: torch.sigmoid(torch.logit(g).square() * torch.logit(g).sign())),
    ),
    "look-up not gated": (engram, "gate", _after(torch.ones_like)),
}
