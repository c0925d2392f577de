"""What is particular to DeepSeek V4, by its definition: one row at a time, in float32.

Source: DeepSeek-AI 2026 (DeepSeek-V4), sections on hybrid attention and hyper-connections.
"""

import torch
from torch import Tensor

from kernels.reference.ragged import rows_of
from kernels.v4 import Entries, Rings


def attention(
    q: Tensor,
    keys: Tensor,
    ring: Tensor,
    rings: Rings,
    cos_sin: Tensor,
    sinks: Tensor,
    *,
    window: int,
    entries: Entries | None = None,
) -> Tensor:
    """Attention to the window's positions and to entries, under one softmax with a sink.

    A value carries the rotation of its position, so the result is rotated back by the row's own.

    Args:
        q: [T, H, D], rotated.
        keys: [T, D]: this round's, rotated; values too.
        ring: [slots, L, D]: earlier rounds' keys; L is at least `window` - 1.
        rings: where they are.
        cos_sin: [T, R / 2, 2] float32: of the last R elements' pairs (2i, 2i + 1), by row.
        sinks: [H] float32.
        window: positions that a row attends to, its own included.
        entries: of a layer that has any.

    Returns:
        [T, H, D] in the format of q. Scores are scaled by 1 / sqrt(D).
    """
    out = torch.zeros_like(q)
    block = entries.block_size if entries else 1
    for row, sequence, begin, table, end in _places(rings, block):
        seen = [
            _at(keys, ring, rings, sequence, begin, place)
            for place in range(max(0, end - window), end)
        ]
        if entries is not None:
            seen += [_entry(entries, table, number) for number in _visible(entries, row, end)]
        history = torch.stack(seen).float()
        scores = q[row].float() @ history.T * q.shape[-1] ** -0.5
        every = torch.cat((scores, sinks.float().unsqueeze(1)), 1).softmax(-1)
        mixed = every[:, :-1] @ history
        out[row] = _rotated(mixed, cos_sin[row] * torch.tensor([1.0, -1.0])).to(q.dtype)
    return out


def compress(
    rows: Tensor,
    ring: Tensor,
    rings: Rings,
    cos_sin: Tensor,
    norm: Tensor,
    entries: Entries,
    *,
    eps: float,
) -> None:
    """Write the entries whose last position is in the round.

    An entry is the sum of its positions' values, weighted per element with the softmax of their
    scores; then normed, and rotated by its first position. Rows may be twice as wide as an entry:
    then it reads the first half of the rows of the `ratio` positions before its own, too, and the
    second half of its own.

    Args:
        rows: [T, 2, width]: values and scores of this round's positions.
        ring: [slots, L, 2, width]: those of earlier rounds; L is at least the positions read.
        rings: where they are.
        cos_sin: [positions, R / 2, 2] float32, by position.
        norm: [D]: weight of the norm.
        entries: where the entries go.
        eps: of the norm.
    """
    dim, ratio = entries.cache.shape[2], entries.ratio
    overlaps = rows.shape[2] == 2 * dim
    for _, sequence, begin, table, end in _places(rings, entries.block_size):
        if end % ratio:
            continue
        parts = []
        for place in range(end - ratio * (2 if overlaps else 1), end):
            if place >= 0:
                row = _at(rows, ring, rings, sequence, begin, place).float()
                parts.append(row[:, :dim] if place < end - ratio else row[:, -dim:])
        values, scores = torch.stack(parts).unbind(1)
        mixed = (values * scores.softmax(0)).sum(0)
        mixed = mixed / (mixed.pow(2).mean() + eps).sqrt() * norm.float()
        turned = _rotated(mixed.unsqueeze(0), cos_sin[end - ratio])[0]
        block, number = table[(end - 1) // entries.block_size], end // ratio - 1
        entries.cache[block, number % entries.cache.shape[1]] = turned.to(entries.cache.dtype)


def keep(rows: Tensor, ring: Tensor, rings: Rings) -> None:
    """Write the round's rows [T, ...] to their places in the ring [slots, L, ...].

    Of more rows than the ring has places, the last ones.
    """
    length = ring.shape[1]
    lengths = rings.batch.lengths.tolist()
    for row, sequence, _, _, end in _places(rings, 1):
        if end > lengths[sequence] - length:
            ring[rings.slots[sequence], (end - 1) % length] = rows[row].to(ring.dtype)


def connect(
    streams: Tensor, weight: Tensor, base: Tensor, scale: Tensor, *, norm_eps: float,
    eps: float, steps: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """What a sublayer reads of the residual streams, and how its output is added to them.

    All weights depend on the row. Sources: DeepSeek-AI 2025 (manifold-constrained
    hyper-connections); Sinkhorn and Knopp 1967.

    Args:
        streams: [T, s, N].
        weight: [2 s + s s, s N] float32.
        base: [2 s + s s] float32.
        scale: [2 s + s s] float32.
        norm_eps: of the norm over all streams.
        eps: added to weights and sums.
        steps: of the balancing.

    Returns:
        The sublayer's input [T, N] in the format of the streams, weights of the output [T, s]
        float32, and the mixing matrix [T, s, s] float32: from stream, to stream.
    """
    count = streams.shape[1]
    flat = streams.flatten(1).float()
    normed = flat / (flat.pow(2).mean(-1, keepdim=True) + norm_eps).sqrt()
    scores = normed @ weight.T * scale + base
    pre = scores[:, :count].sigmoid() + eps
    post = 2 * scores[:, count : 2 * count].sigmoid()
    mix = scores[:, 2 * count :].view(-1, count, count).softmax(-1) + eps
    mix = mix / (mix.sum(1, keepdim=True) + eps)
    for _ in range(steps - 1):
        mix = mix / (mix.sum(2, keepdim=True) + eps)
        mix = mix / (mix.sum(1, keepdim=True) + eps)
    read = torch.einsum("ts,tsn->tn", pre, streams.float())
    return read.to(streams.dtype), post, mix


def spread(streams: Tensor, output: Tensor, post: Tensor, mix: Tensor) -> Tensor:
    """New streams [T, s, N] after a sublayer whose output is [T, N]; see `connect`."""
    mixed = torch.einsum("tij,tin->tjn", mix, streams.float())
    return (mixed + post.unsqueeze(-1) * output.float().unsqueeze(1)).to(streams.dtype)


def _places(rings: Rings, block: int) -> list[tuple[int, int, int, Tensor, int]]:
    """Row, sequence, positions before the round, blocks, positions up to its own: of each row."""
    starts, lengths = rings.batch.query_starts.tolist(), rings.batch.lengths.tolist()
    places = []
    for row, table, end in rows_of(rings.batch, block):
        sequence = max(s for s in range(len(lengths)) if starts[s] <= row < starts[s + 1])
        begin = lengths[sequence] - (starts[sequence + 1] - starts[sequence])
        places.append((row, sequence, begin, table, end))
    return places


def _at(rows: Tensor, ring: Tensor, rings: Rings, sequence: int, begin: int, place: int) -> Tensor:
    """The row of a position: this round's, or the ring's."""
    if place >= begin:
        return rows[int(rings.batch.query_starts[sequence]) + place - begin]
    return ring[int(rings.slots[sequence]), place % ring.shape[1]].to(rows.dtype)


def _visible(entries: Entries, row: int, end: int) -> list[int]:
    if entries.chosen is None:
        return list(range(end // entries.ratio))
    return [number for number in entries.chosen[row].tolist() if number >= 0]


def _entry(entries: Entries, table: Tensor, number: int) -> Tensor:
    block = table[((number + 1) * entries.ratio - 1) // entries.block_size]
    return entries.cache[block, number % entries.cache.shape[1]]


def _rotated(x: Tensor, cos_sin: Tensor) -> Tensor:
    """x [N, D] with its last R elements rotated by cos_sin [R / 2, 2]."""
    size = 2 * len(cos_sin)
    head, tail = x[:, :-size], x[:, -size:]
    even, odd = tail[:, 0::2], tail[:, 1::2]
    cos, sin = cos_sin.unbind(1)
    turned = torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1)
    return torch.cat((head, turned.flatten(1)), 1)
