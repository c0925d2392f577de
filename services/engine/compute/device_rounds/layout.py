"""Lays out one round as one array of words, which is copied to the device at once.

Sequences of one position come first. Positions, slots and the tokens of the round before are not
here: the device makes them from what is.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from torch import Tensor

from kernels.ragged import RaggedBatch
from services.engine.compute.sampling.batch_inputs import Parts, Words
from services.engine.contract.runner import SequenceMetadata

PADDING = SequenceMetadata(-1, 0, (0,), None, (0,), sample=False)
"""A sequence of one position in block 0, which belongs to none: it fills a graph's empty rows."""


class ScoredPrompt(NamedTuple):
    """Rows of one sequence whose predictions of prompt tokens are reported."""

    seq_id: int
    rows: slice
    """Among the rows of the round."""
    targets: slice
    """Among the words: the prompt token after each row."""
    top: int
    """Likeliest alternatives to report per row."""


@dataclass(frozen=True, slots=True)
class Layout:
    """One round of S sequences and T rows; places in `words`."""

    words: Words
    query_starts: slice
    lengths: slice
    previous: slice
    """[S]: rows of the round before whose token is the sequence's last one; -1: none."""
    tokens: slice
    tables: slice
    """[S, width]."""
    sampled: slice
    """Last rows of the sequences that sample, in the order of the batch."""
    prompts: tuple[ScoredPrompt, ...]
    spans: tuple[tuple[int, int], ...]
    """Of each sequence: positions computed before, and positions of this round."""
    num_decodes: int
    max_queries: int
    max_length: int

    @property
    def num_sequences(self) -> int:
        """S."""
        return len(self.spans)

    def batch(self, words: Tensor) -> RaggedBatch:
        """The batch of uploaded words [N] int32."""
        return RaggedBatch(
            query_starts=words[self.query_starts],
            lengths=words[self.lengths],
            block_tables=words[self.tables].view(self.num_sequences, -1),
            max_queries=self.max_queries,
            max_length=self.max_length,
            num_decodes=self.num_decodes,
        )


def lay_out(
    batch: Sequence[SequenceMetadata], block_size: int, *, width: int = 0, max_length: int = 0
) -> Layout:
    """Lay out one round.

    Args:
        width: blocks of a line of the table; 0: those of the longest sequence.
        max_length: bound of the lengths; 0: the longest sequence.
    """
    ordered = sorted(batch, key=_takes_many)
    counts = [seq.seqlen_q for seq in ordered]
    starts = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
    first = {id(seq): int(row) for seq, row in zip(ordered, starts, strict=False)}
    longest = max(seq.seqlen_k for seq in ordered)
    parts = Parts()
    return Layout(
        query_starts=parts.add(starts),
        lengths=parts.add(seq.seqlen_k for seq in ordered),
        previous=parts.add(-1 if seq.prev_row is None else seq.prev_row for seq in ordered),
        tokens=parts.add(token for seq in ordered for token in seq.token_ids),
        tables=parts.add(_tables(ordered, block_size, width or -(-longest // block_size))),
        sampled=parts.add(first[id(s)] + s.seqlen_q - 1 for s in batch if s.sample),
        prompts=tuple(
            _scored(seq, first[id(seq)], parts)
            for seq in ordered
            if seq.prompt_logprobs_from is not None
        ),
        spans=tuple((seq.start, seq.seqlen_q) for seq in ordered),
        num_decodes=sum(count == 1 for count in counts),
        max_queries=max(counts),
        max_length=max_length or longest,
        words=parts.words(),
    )


def _takes_many(seq: SequenceMetadata) -> bool:
    return seq.seqlen_q > 1


def _tables(ordered: Sequence[SequenceMetadata], block_size: int, width: int) -> Words:
    tables = np.zeros((len(ordered), width), np.int32)
    for line, seq in zip(tables, ordered, strict=True):
        count = -(-seq.seqlen_k // block_size)
        line[:count] = seq.block_table[:count]
    return tables


def _scored(seq: SequenceMetadata, row: int, parts: Parts) -> ScoredPrompt:
    assert seq.prompt_logprobs_from is not None
    skip = seq.prompt_logprobs_from - seq.start
    targets = list(seq.token_ids[skip + 1 :])
    if seq.next_prompt_token is not None:
        targets.append(seq.next_prompt_token)
    rows = slice(row + skip, row + skip + len(targets))
    return ScoredPrompt(seq.seq_id, rows, parts.add(targets), seq.num_prompt_top_logprobs)
