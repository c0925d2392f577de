"""Where the rows of one round read and write, for all layers of one ratio.

The rows of several requests follow one another. A row reads rows of earlier rounds from its
request's ring, where position p is at p mod the ring's length, and rows of this round directly.
Both are joined to one pool per layer, in which all indices of this module count.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from services.engine.compute.models.cache_tensors import rows_per_block
from services.engine.contract.runner import SequenceMetadata


@dataclass(frozen=True, slots=True)
class RingPlan:
    """How the rows of a ring [slots, length, ...] and those of the round make one pool."""

    past_slots: Tensor
    """[requests * reach] int64: slots of the rows of earlier rounds, by request."""
    past_places: Tensor
    """[requests * reach] int64: their places in the ring, oldest first."""
    rows: Tensor
    """[kept] int64: rows of the round that the ring keeps."""
    slots: Tensor
    """[kept] int64: their slots."""
    places: Tensor
    """[kept] int64: their places in the ring."""

    def join(self, ring: Tensor, rows: Tensor) -> Tensor:
        """The pool [requests * reach + T, ...] of the ring's rows and this round's [T, ...]."""
        past = ring[self.past_slots, self.past_places]
        return torch.cat((past.to(rows.dtype), rows))

    def keep(self, ring: Tensor, rows: Tensor) -> None:
        """Write this round's last rows to the ring; later than `join` of the same layer."""
        ring[self.slots, self.places] = rows[self.rows].to(ring.dtype)


@dataclass(frozen=True, slots=True)
class EntryPlan:
    """The compressed entries that a round completes, and those that its rows may attend to."""

    ring: RingPlan
    index: Tensor
    """[E, span] int64: the rows of the pool that make each entry, oldest first."""
    missing: Tensor
    """[E, span] bool: the position is before the first one."""
    positions: Tensor
    """[E] int64: first position of each entry's own window; the entry is rotated by it."""
    slots: Tensor
    """[E] int64: where the entries go, counted over all blocks."""
    tables: Tensor
    """[requests, entries] int64: slot of each entry of each request, padded with 0."""
    visible: tuple[int, ...]
    """Per row of the round: entries that it may attend to, which are the first ones."""
    phases: Tensor
    """[T] int64: position of each row within its window."""


@dataclass(frozen=True, slots=True)
class RoundPlan:
    """The rows of one round; T rows."""

    token_ids: Tensor
    """[T] int64."""
    positions: Tensor
    """[T] int64."""
    requests: Tensor
    """[T] int64: the request of each row, counted from 0."""
    ring: RingPlan
    """Of the latest positions' keys."""
    window: Tensor
    """[T, window] int64: rows of the pool that a row attends to, oldest first. Positions before the
    first one of the state show the row itself, and are not attended to."""
    seen: tuple[int, ...]
    """Per row: positions of the window that exist; the last ones of its line."""
    entries: dict[int, EntryPlan]
    """By the ratio of the layers."""


def plan_round(
    requests: Sequence[SequenceMetadata],
    token_ids: Tensor,
    *,
    window: int,
    spans: Mapping[int, int],
    block_size: int,
    drafts: int = 0,
) -> RoundPlan:
    """Lay out one round.

    Args:
        requests: in the order of the rows.
        token_ids: [T] int64; it has the tokens that `requests` do not know yet.
        window: latest positions that every row attends to, itself included.
        spans: by ratio of the layers: positions whose rows make one entry.
        block_size: positions of a history block; a multiple or a divisor of each ratio.
        drafts: positions that may be rejected after a round and computed again.
    """
    lines = Lines(requests)
    known = lines.positions - lines.state_from[lines.requests]
    seen = tuple(min(int(p) + 1, window) for p in known.tolist())
    return RoundPlan(
        token_ids=token_ids,
        positions=lines.positions,
        requests=lines.requests,
        ring=plan_ring(lines, window, drafts),
        window=lines.pool_rows(lines.requests, lines.positions, window, lines.state_from)[0],
        seen=seen,
        entries={
            ratio: _entries(lines, ratio, span, block_size, drafts) for ratio, span in spans.items()
        },
    )


def ring_length(span: int, drafts: int) -> int:
    """Rows of a ring of which a round reads the last `span - 1`.

    Up to `drafts` positions that a round wrote may be rejected. They must not have taken the place
    of rows that the next round reads.
    """
    return span + drafts


class Lines:
    """The requests of a round as tensors with one line each, and what both pools share."""

    def __init__(self, requests: Sequence[SequenceMetadata]) -> None:
        counts = torch.tensor([request.seqlen_q for request in requests])
        self.all = requests
        self.starts = torch.tensor([request.start for request in requests])
        self.state_from = torch.tensor([request.state_from for request in requests])
        self.history_from = torch.tensor([request.history_from for request in requests])
        self.first_rows = counts.cumsum(0) - counts
        self.requests = torch.arange(len(requests)).repeat_interleave(counts)
        rows = torch.arange(len(self.requests))
        self.positions = rows - (self.first_rows - self.starts)[self.requests]

    def pool_rows(
        self, requests: Tensor, ends: Tensor, span: int, first: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Rows [N, span] of a pool for the positions up to `ends` [N] of `requests` [N].

        Args:
            first: by request: first position that is in the pool; 0 if it is not given.

        Returns:
            The rows, and which positions are before the first one: those show the end instead.
        """
        reach = span - 1
        wanted = ends.unsqueeze(1) + torch.arange(-reach, 1)
        line = requests.unsqueeze(1)
        missing = wanted < (0 if first is None else first[line])
        wanted = torch.where(missing, ends.unsqueeze(1), wanted)
        since = wanted - self.starts[line]
        fresh = len(self.all) * reach + self.first_rows[line] + since
        return torch.where(since >= 0, fresh, (line + 1) * reach + since), missing


def plan_ring(lines: Lines, span: int, drafts: int) -> RingPlan:
    """The ring of which a round reads the last `span - 1` rows; see `ring_length`."""
    reach, length = span - 1, ring_length(span, drafts)
    slots = torch.tensor([request.state_slot for request in lines.all])
    before = lines.starts.unsqueeze(1) + torch.arange(-reach, 0)
    ends = torch.tensor([request.seqlen_k for request in lines.all])
    kept = (lines.positions >= ends[lines.requests] - length).nonzero().flatten()
    return RingPlan(
        past_slots=slots.repeat_interleave(reach),
        past_places=before.remainder(length).flatten(),
        rows=kept,
        slots=slots[lines.requests[kept]],
        places=lines.positions[kept].remainder(length),
    )


def _entries(lines: Lines, ratio: int, span: int, block_size: int, drafts: int) -> EntryPlan:
    ends_group = (lines.positions + 1) % ratio == 0
    last = (
        (ends_group & (lines.positions >= lines.history_from[lines.requests])).nonzero().flatten()
    )
    ends, requests = lines.positions[last], lines.requests[last]
    index, missing = lines.pool_rows(requests, ends, span)
    tables = _entry_tables(lines, ratio, block_size)
    return EntryPlan(
        ring=plan_ring(lines, span, drafts),
        index=index,
        missing=missing,
        positions=ends + 1 - ratio,
        slots=tables[requests, ends // ratio],
        tables=tables,
        visible=tuple((int(p) + 1) // ratio for p in lines.positions.tolist()),
        phases=lines.positions % ratio,
    )


def _entry_tables(lines: Lines, ratio: int, block_size: int) -> Tensor:
    """[requests, entries] int64: where each request's entries are, counted over all blocks."""
    per_block = rows_per_block(ratio, block_size)
    width = max(request.seqlen_k // ratio for request in lines.all)
    tables = torch.zeros(len(lines.all), max(width, 1), dtype=torch.long)
    for line, request in enumerate(lines.all):
        entries = torch.arange(request.seqlen_k // ratio)
        blocks = torch.tensor(request.block_table)[((entries + 1) * ratio - 1) // block_size]
        tables[line, : len(entries)] = blocks * per_block + entries % per_block
    return tables
