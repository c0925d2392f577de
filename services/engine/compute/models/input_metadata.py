"""Lays out one round as tensors: token ids, positions, slots, attention groups, sampled rows.

Sequences that compute one position come first, so that one call computes their attention. Tokens
are still sampled in the order of the batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.interface import AttentionGroup, KeptRows
from kernels.ragged import RaggedBatch
from kernels.whole_rounds import Spans
from services.engine.compute.models.decode_rows import DecodeRows
from services.engine.contract.runner import SequenceMetadata

GATHERED = 8192
"""Positions, padding included, whose keys and values one call of decode attention gathers, at most.

It bounds memory, keeps the copy in the CPU's cache, and limits how far short sequences are padded
to long ones."""


@dataclass(frozen=True, slots=True)
class PromptRows:
    """Rows of one sequence whose predictions of prompt tokens are reported."""

    seq_id: int
    rows: Tensor
    """[wanted] int64, among the T rows of the round."""
    targets: Tensor
    """[wanted] int64: the prompt token after each row."""
    top: int
    """Likeliest alternatives to report per row."""


@dataclass(frozen=True, slots=True)
class InputMetadata:
    """The tensors of one round that a model reads; T rows."""

    token_ids: Tensor
    """[T] int64."""
    positions: Tensor
    """[T] int64."""
    slots: Tensor
    """[T] int64: block * block_size + offset."""
    groups: tuple[AttentionGroup, ...]
    window_groups: tuple[AttentionGroup, ...]
    """For layers with a sliding window; the same as `groups` if no history exceeds the window."""
    sampled_rows: Tensor
    """[sampled] int64: last rows of the sequences that sample, in the order of the batch."""
    prompt_rows: tuple[PromptRows, ...]
    spans: Spans | None = None
    """For models that run whole rounds; `groups` is then empty."""
    sequences: tuple[SequenceMetadata, ...] = ()
    """In the order of the rows; `token_ids` above has the tokens of those with `prev_row`."""
    ragged: RaggedBatch | None = None
    """All sequences, for kernel sets whose attention takes them at once; `groups` is then empty, or
    for latent attention only."""


def build_input(
    batch: Sequence[SequenceMetadata],
    previous_tokens: Tensor | None,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
    window: int = 0,
    rows: DecodeRows | None = None,
    *,
    whole_rounds: bool = False,
    own_layout: bool = False,
    prefill_masks: bool = True,
) -> InputMetadata:
    """Lay out one round.

    Args:
        previous_tokens: [rows] sampled tokens of the previous round, for sequences with `prev_row`.
        dtype: number format of the attention mask.
        window: sliding window in positions; 0: the model has no layer with one.
        rows: contiguous copies of decodes' keys and values, for kernel sets that use them.
        whole_rounds: lay the round out for `kernels.whole_rounds`, not for attention groups.
        own_layout: the model reads `sequences` instead of attention groups.
        prefill_masks: whether attention reads the masks of prefills, which are [rows, history].

    Raises:
        ValueError: a sequence has `prev_row`, but there are no previous tokens.
    """
    ordered = sorted(batch, key=_layout_key)
    kept = None if rows is None else _assign_rows(ordered, rows)
    first_row = _first_rows(ordered)
    tokens = [token for seq in ordered for token in seq.token_ids]
    positions = [p for seq in ordered for p in range(seq.start, seq.seqlen_k)]
    slots = _slots(ordered, block_size)
    last_row = {
        id(seq): row + seq.seqlen_q - 1 for seq, row in zip(ordered, first_row, strict=True)
    }
    token_ids = torch.tensor(tokens, dtype=torch.long).to(device)
    _fill_previous(token_ids, ordered, last_row, previous_tokens)
    sampled = [last_row[id(seq)] for seq in batch if seq.sample]
    groups: tuple[AttentionGroup, ...] = ()
    if not whole_rounds and not own_layout:
        groups = tuple(
            _groups(ordered, first_row, block_size, dtype, device, kept, masks=prefill_masks)
        )
    window_groups = groups
    if groups and window and any(seq.seqlen_k > window for seq in batch):
        window_groups = tuple(
            _groups(
                ordered, first_row, block_size, dtype, device, kept, window, masks=prefill_masks
            )
        )
    return InputMetadata(
        token_ids=token_ids,
        positions=torch.tensor(positions, dtype=torch.long).to(device),
        slots=torch.tensor(slots, dtype=torch.long).to(device),
        groups=groups,
        window_groups=window_groups,
        sampled_rows=torch.tensor(sampled, dtype=torch.long).to(device),
        prompt_rows=tuple(_prompt_rows(ordered, first_row, device)),
        spans=_spans(ordered, first_row, block_size) if whole_rounds else None,
        sequences=tuple(ordered),
    )


def _slots(ordered: Sequence[SequenceMetadata], block_size: int) -> list[int]:
    return [
        seq.block_table[p // block_size] * block_size + p % block_size
        for seq in ordered
        for p in range(seq.start, seq.seqlen_k)
    ]


def _spans(ordered: Sequence[SequenceMetadata], first_row: Sequence[int], block_size: int) -> Spans:
    seqs = [(row, seq.seqlen_q, seq.start) for seq, row in zip(ordered, first_row, strict=True)]
    width = max(-(-seq.seqlen_k // block_size) for seq in ordered)
    tables = [(seq.block_table + (0,) * width)[:width] for seq in ordered]
    return Spans(torch.tensor(seqs), torch.tensor(tables))


class _KeptGroup(NamedTuple):
    rows: KeptRows
    num_seqs: int
    """The first sequences of the round, this many, have a kept row."""


def _assign_rows(ordered: list[SequenceMetadata], rows: DecodeRows) -> _KeptGroup | None:
    """Assign rows to the shortest decodes, as many as fit, and sort these by their rows."""
    single = [seq for seq in ordered if seq.seqlen_q == 1]
    count = 0
    while count < len(single) and rows.fits(count + 1, single[count].seqlen_k):
        count += 1
    if not count:
        return None
    ordered[:count], kept = rows.assign(ordered[:count])
    return _KeptGroup(kept, count)


def _first_rows(ordered: Sequence[SequenceMetadata]) -> list[int]:
    rows, at = [], 0
    for seq in ordered:
        rows.append(at)
        at += seq.seqlen_q
    return rows


def _fill_previous(
    token_ids: Tensor,
    ordered: Sequence[SequenceMetadata],
    last_row: dict[int, int],
    previous_tokens: Tensor | None,
) -> None:
    """Copy tokens that the previous round sampled, without a copy through the host."""
    dependent = [seq for seq in ordered if seq.prev_row is not None]
    if not dependent:
        return
    if previous_tokens is None:
        raise ValueError("a sequence has prev_row, but there are no tokens of a previous round")
    rows = torch.tensor([last_row[id(seq)] for seq in dependent]).to(token_ids.device)
    source = torch.tensor([seq.prev_row for seq in dependent]).to(token_ids.device)
    token_ids[rows] = previous_tokens[source]


def _groups(
    ordered: Sequence[SequenceMetadata],
    first_row: Sequence[int],
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
    kept: _KeptGroup | None,
    window: int = 0,
    *,
    masks: bool = True,
) -> list[AttentionGroup]:
    single = [seq for seq in ordered if seq.seqlen_q == 1]
    groups, row = [], 0
    if kept is not None:
        own, row = single[: kept.num_seqs], kept.num_seqs
        groups.append(_decode_group(own, 0, block_size, dtype, device, window, kept.rows))
    rest = single[row:]
    # Only CPU attention gathers and needs a bound; a GPU computes all decodes in one call.
    for part in _parts(rest) if device.type == "cpu" else [rest] if rest else []:
        groups.append(_decode_group(part, row, block_size, dtype, device, window))
        row += len(part)
    for seq, row in zip(ordered[len(single) :], first_row[len(single) :], strict=True):
        groups.append(_prefill_group(seq, row, block_size, dtype, device, window, masks=masks))
    return groups


def _layout_key(seq: SequenceMetadata) -> tuple[bool, int]:
    """Sort key: decodes before prefills, and decodes with short histories first."""
    return (seq.seqlen_q > 1, seq.seqlen_k if seq.seqlen_q == 1 else 0)


def _parts(single: Sequence[SequenceMetadata]) -> list[list[SequenceMetadata]]:
    """Cut decodes, sorted by length, so that no group gathers more than GATHERED positions."""
    parts: list[list[SequenceMetadata]] = []
    for seq in single:
        if parts and (len(parts[-1]) + 1) * seq.seqlen_k <= GATHERED:
            parts[-1].append(seq)
        else:
            parts.append([seq])
    return parts


def _decode_group(
    seqs: Sequence[SequenceMetadata],
    row: int,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
    window: int,
    kept: KeptRows | None = None,
) -> AttentionGroup:
    counts = [-(-seq.seqlen_k // block_size) for seq in seqs]
    width = max(counts)
    positions = max(seq.seqlen_k for seq in seqs) if kept else width * block_size
    tables = [
        seq.block_table[:count] + (0,) * (width - count)
        for seq, count in zip(seqs, counts, strict=True)
    ]
    lengths = torch.tensor([seq.seqlen_k for seq in seqs])
    return AttentionGroup(
        rows=slice(row, row + len(seqs)),
        starts=tuple(seq.start for seq in seqs),
        block_tables=torch.tensor(tables, dtype=torch.long).to(device),
        mask=_decode_mask(lengths, positions, window, dtype, device),
        causal=False,
        lengths=lengths.int().to(device),
        window=window,
        kept=kept,
    )


def _decode_mask(
    lengths: Tensor, width: int, window: int, dtype: torch.dtype, device: torch.device
) -> Tensor | None:
    """[sequences, 1, 1, width]; None if every row attends to all positions."""
    positions = torch.arange(width)
    hidden = positions >= lengths.unsqueeze(1)
    if window:
        hidden |= positions < lengths.unsqueeze(1) - window
    if not hidden.any():
        return None
    mask = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, float("-inf"))
    return mask[:, None, None].to(device)


def _prefill_group(
    seq: SequenceMetadata,
    row: int,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
    window: int,
    *,
    masks: bool,
) -> AttentionGroup:
    count = -(-seq.seqlen_k // block_size)
    slides = 0 < window < seq.seqlen_k
    plain = not seq.start and not slides
    mask = None
    if masks and not plain:
        mask = torch.full((seq.seqlen_q, seq.seqlen_k), float("-inf"), dtype=dtype)
        mask.triu_(seq.start + 1)
        if slides:
            older = torch.full_like(mask, float("-inf")).tril_(seq.start - window)
            mask.add_(older)
        mask = mask.to(device)
    return AttentionGroup(
        rows=slice(row, row + seq.seqlen_q),
        starts=(seq.start,),
        block_tables=torch.tensor([seq.block_table[:count]], dtype=torch.long).to(device),
        mask=mask,
        causal=plain,
        window=window,
    )


def _prompt_rows(
    ordered: Sequence[SequenceMetadata], first_row: Sequence[int], device: torch.device
) -> list[PromptRows]:
    found = []
    for seq, row in zip(ordered, first_row, strict=True):
        if seq.prompt_logprobs_from is None:
            continue
        skip = seq.prompt_logprobs_from - seq.start
        targets = list(seq.token_ids[skip + 1 :])
        if seq.next_prompt_token is not None:
            targets.append(seq.next_prompt_token)
        rows = torch.arange(row + skip, row + skip + len(targets))
        found.append(
            PromptRows(
                seq_id=seq.seq_id,
                rows=rows.to(device),
                targets=torch.tensor(targets, dtype=torch.long).to(device),
                top=seq.num_prompt_top_logprobs,
            )
        )
    return found
