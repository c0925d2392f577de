"""Decode rounds captured as graphs, by bucket: a number of sequences and a length.

A round of decodes is run by the smallest graph that it fits into; padding sequences stand in block
0. Prompts, and rounds beyond the largest bucket, are launched one operator after another.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from services.engine.compute.device.interface import Device, Graph
from services.engine.compute.device_rounds.layout import PADDING, Layout, lay_out
from services.engine.contract.runner import SequenceMetadata

if TYPE_CHECKING:
    from services.engine.compute.device_rounds.rounds import RoundLimits

log = logging.getLogger(__name__)

LARGEST = 256
"""Sequences of the largest graph: with more of them the device is busy longer than a launch."""
FIRST_LENGTH = 2048
"""Positions of the shortest bucket; each next one is 4 times as long."""


@dataclass(frozen=True, slots=True)
class _Captured:
    graph: Graph
    width: int
    """Blocks of a line of the table."""
    hidden: Tensor
    """[sequences, hidden]: the graph's result."""


def batch_buckets(max_num_seqs: int) -> list[int]:
    """Numbers of sequences: powers of two up to 8, then multiples of 8 or more, about 1.5 apart."""
    largest = min(max_num_seqs, LARGEST)
    sizes = [1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256]
    return [size for size in sizes if size < largest] + [largest]


def length_buckets(max_length: int) -> list[int]:
    """Positions of the longest sequence: FIRST_LENGTH times powers of 4, the last `max_length`."""
    lengths, at = [], FIRST_LENGTH
    while at < max_length:
        lengths.append(at)
        at *= 4
    return [*lengths, max_length]


class DecodeGraphs:
    """The graphs of one model on one set of blocks."""

    def __init__(
        self,
        device: Device,
        limits: "RoundLimits",
        run: Callable[[Layout, Tensor], Tensor],
    ) -> None:
        """
        Args:
            run: launches the layers of a round whose words are on the device; returns hidden
                states [T, hidden].
        """
        self._device, self._limits, self._run = device, limits, run
        self._batches = batch_buckets(limits.max_num_seqs)
        self._lengths = length_buckets(limits.max_length)
        largest = self._plan(self._batches[-1], self._lengths[-1])
        self._words = torch.zeros(len(largest.words), dtype=torch.int32, device=device.place)
        """What the graphs read: a round's words, from the first one on."""
        self._captured: dict[tuple[int, int], _Captured] = {}
        self.nbytes = 0
        """Memory of the graphs in bytes, as free memory shrank while they were captured."""

    def __len__(self) -> int:
        return len(self._captured)

    def capture_all(self) -> None:
        """Capture every bucket, the largest first: the others share its memory."""
        before = self._device.free_bytes()
        for length in reversed(self._lengths):
            for count in reversed(self._batches):
                self._captured[count, length] = self._capture(count, length)
        self.nbytes = max(0, before - self._device.free_bytes())
        log.info(
            "captured %d decode rounds of up to %d sequences and %d positions: %d MiB",
            len(self),
            self._batches[-1],
            self._lengths[-1],
            self.nbytes >> 20,
        )

    def fits(self, batch: Sequence[SequenceMetadata]) -> bool:
        """Whether a graph can run the round."""
        return (
            len(batch) <= self._batches[-1]
            and all(seq.seqlen_q == 1 for seq in batch)
            and all(seq.prompt_logprobs_from is None for seq in batch)
        )

    def run(self, batch: Sequence[SequenceMetadata]) -> tuple[Layout, Tensor, Tensor]:
        """Copy a round's words up and launch its graph.

        Returns:
            The layout, the words on the device, and the hidden states [T, hidden] of all rows,
            padding included. The tensors are valid until the next round is launched.
        """
        count = next(size for size in self._batches if size >= len(batch))
        longest = max(seq.seqlen_k for seq in batch)
        length = next(size for size in self._lengths if size >= longest)
        captured = self._captured[count, length]
        padded = [*batch, *[PADDING] * (count - len(batch))]
        layout = lay_out(padded, self._limits.block_size, width=captured.width, max_length=length)
        words = self._device.upload(layout.words, self._words[: len(layout.words)])
        captured.graph.replay()
        return layout, words, captured.hidden

    def _plan(self, count: int, length: int) -> Layout:
        """The layout of a bucket's rounds: every sequence samples."""
        width = -(-length // self._limits.block_size)
        one = SequenceMetadata(-1, 0, (0,), None, (0,), sample=True)
        return lay_out([one] * count, self._limits.block_size, width=width, max_length=length)

    def _capture(self, count: int, length: int) -> _Captured:
        layout = self._plan(count, length)
        words = self._device.upload(layout.words, self._words[: len(layout.words)])
        sample = self._run(layout, words)  # also compiles what the capture must not
        hidden = torch.empty_like(sample)

        def run() -> None:
            hidden.copy_(self._run(layout, words))

        width = -(-length // self._limits.block_size)
        return _Captured(self._device.capture(run), width, hidden)
