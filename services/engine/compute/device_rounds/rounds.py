"""`DeviceRounds`: runs rounds on a device without a wait of the host.

A round is: one copy up of words that the host lays out, rows made on the device, the layers, the
draw, and one copy down that the caller awaits while the next round is launched. Drawn tokens stay
on the device, where the next round finds them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.interface import AttentionGroup, Kernels
from services.engine.compute.device.interface import Device
from services.engine.compute.device_rounds.graphs import DecodeGraphs
from services.engine.compute.device_rounds.layout import Layout, lay_out
from services.engine.compute.device_rounds.results import DeviceHidden, RoundOutput, ScoredRows
from services.engine.compute.models.input_metadata import InputMetadata
from services.engine.compute.models.registry import Model
from services.engine.compute.sampling.batch_inputs import build_batch, ids
from services.engine.compute.sampling.batch_sampler import batch_logprobs, sample_batch
from services.engine.compute.sampling.prompt_scores import PROMPT_LOGPROB_ROWS
from services.engine.contract.config import EngineConfig
from services.engine.contract.model_config import ModelConfig
from services.engine.contract.runner import SamplingRow, SequenceMetadata


@dataclass(frozen=True, slots=True)
class RoundLimits:
    """The largest round."""

    block_size: int
    max_num_seqs: int
    max_length: int
    """Positions of a sequence, at most."""
    vocabulary: int
    latent: bool = False
    """The model has latent attention: it reads groups, if the kernel set has none for batches."""
    experts: bool = False
    """The model has experts: they run in a loop, if the kernel set cannot run them together."""


def serves(kernels: Kernels) -> bool:
    """Whether a kernel set has what rounds on a device need."""
    return kernels.ragged is not None and kernels.round_rows is not None


class DeviceRounds:
    """Runs rounds of one model. One thread calls all methods."""

    def __init__(self, device: Device, kernels: Kernels, model: Model, limits: RoundLimits) -> None:
        """
        Args:
            kernels: a set that `serves` says yes to.
        """
        self._device, self._kernels, self._model = device, kernels, model
        self._limits = limits
        self._drawn = torch.zeros(limits.max_num_seqs, dtype=torch.int64, device=device.place)
        """Tokens of the last round that sampled, by row: graphs read them here."""
        self._caches: tuple[Tensor, ...] = ()
        self._graphs: DecodeGraphs | None = None

    def allocate(self, caches: Sequence[Tensor]) -> None:
        """Use these tensors of blocks from now on, and capture decode rounds on them."""
        self._caches = tuple(caches)
        self._graphs = None
        if self._device.captures and caches and not self._waits:
            self._graphs = DecodeGraphs(self._device, self._limits, self._run)
            self._graphs.capture_all()

    @property
    def num_graphs(self) -> int:
        """Captured rounds."""
        return len(self._graphs) if self._graphs is not None else 0

    @property
    def graph_bytes(self) -> int:
        """Memory that captured rounds keep, in bytes, as measured when they were captured."""
        return self._graphs.nbytes if self._graphs is not None else 0

    def forward(self, batch: Sequence[SequenceMetadata], *, has_previous: bool) -> DeviceHidden:
        """Launch the layers of one round, and the logits of what it samples.

        Args:
            has_previous: there was a round that sampled, for sequences with `prev_row`.

        Raises:
            ValueError: a sequence has `prev_row`, but there is no round before.
        """
        if not has_previous and any(seq.prev_row is not None for seq in batch):
            raise ValueError("a sequence has prev_row, but there are no tokens of a previous round")
        graphs = self._graphs
        if graphs is not None and graphs.fits(batch):
            layout, words, hidden = graphs.run(batch)
        else:
            layout = lay_out(batch, self._limits.block_size)
            words = self._device.upload(layout.words)
            hidden = self._run(layout, words)
        rows = hidden.index_select(0, ids(words, layout.sampled))
        return DeviceHidden(self._model.logits(rows), self._score(hidden, layout, words))

    def sample(self, step: int, hidden: DeviceHidden, rows: Sequence[SamplingRow]) -> RoundOutput:
        """Launch the draw of one token per row, and the copies to the host."""
        fetched: list[Tensor] = []
        tokens = None
        if rows:
            inputs = build_batch(rows, self._limits.vocabulary)
            words = self._device.upload(inputs.words) if len(inputs.words) else None
            draw = sample_batch(self._kernels, hidden.logits, inputs, words)
            tokens = self._drawn[: len(rows)].copy_(draw.tokens)
            fetched += [draw.checks, *draw.logprobs]
        fetched += [part for own in hidden.prompts for chunk in own.chunks for part in chunk]
        return RoundOutput(step, tokens, rows, hidden.prompts, self._device.fetch(fetched))

    def _run(self, layout: Layout, words: Tensor) -> Tensor:
        """Hidden states [T, hidden] of a round whose words are on the device."""
        batch = layout.batch(words)
        assert self._kernels.round_rows is not None
        made = self._kernels.round_rows(
            words[layout.tokens],
            words[layout.previous],
            self._drawn,
            batch,
            self._limits.block_size,
        )
        groups = self._groups(layout, words)
        data = InputMetadata(
            token_ids=made.token_ids,
            positions=made.positions,
            slots=made.slots,
            groups=groups,
            window_groups=groups,
            sampled_rows=words[layout.sampled],
            prompt_rows=(),
            ragged=batch,
        )
        return self._model.forward(data, self._caches)

    @property
    def _waits(self) -> bool:
        """Whether a forward cannot be captured: it reads the device, or the host's lengths."""
        together = getattr(self._kernels, "experts", None) is not None
        return self._reads_groups or (self._limits.experts and not together)

    @property
    def _reads_groups(self) -> bool:
        latent = self._kernels.latent
        return self._limits.latent and (latent is None or latent.ragged is None)

    def _groups(self, layout: Layout, words: Tensor) -> tuple[AttentionGroup, ...]:
        """Groups for latent attention; the kernels that read them need no mask."""
        if not self._reads_groups:
            return ()
        tables = words[layout.tables].view(layout.num_sequences, -1).long()
        groups = []
        decodes = layout.num_decodes
        if decodes:
            first = tuple(start for start, _ in layout.spans[:decodes])
            lengths = words[layout.lengths][:decodes]
            groups.append(
                AttentionGroup(slice(0, decodes), first, tables[:decodes], None, False, lengths)
            )
        row = decodes
        for index, (start, count) in enumerate(layout.spans[decodes:], decodes):
            rows = slice(row, row + count)
            groups.append(
                AttentionGroup(rows, (start,), tables[index : index + 1], None, not start)
            )
            row += count
        return tuple(groups)

    def _score(self, hidden: Tensor, layout: Layout, words: Tensor) -> tuple[ScoredRows, ...]:
        """Launch the log-probabilities of prompt tokens."""
        scored = []
        for own in layout.prompts:
            states, targets = hidden[own.rows], ids(words, own.targets)
            chunks = []
            for at in range(0, len(states), PROMPT_LOGPROB_ROWS):
                part = slice(at, at + PROMPT_LOGPROB_ROWS)
                logits = self._model.logits(states[part])
                chunks.append(batch_logprobs(logits, targets[part], own.top))
            known = tuple(layout.words[own.targets].tolist())
            scored.append(ScoredRows(own.seq_id, known, tuple(chunks)))
        return tuple(scored)


def make_rounds(
    device: Device, kernels: Kernels, model: Model, config: EngineConfig, shape: ModelConfig
) -> DeviceRounds | None:
    """What runs a model's rounds without a wait; None if the kernel set cannot."""
    if not serves(kernels):
        return None
    limits = RoundLimits(
        block_size=config.block_size,
        max_num_seqs=config.max_num_seqs,
        max_length=config.max_model_len or shape.max_position,
        vocabulary=shape.vocab_size,
        latent=shape.mla is not None,
        experts=shape.moe is not None,
    )
    return DeviceRounds(device, kernels, model, limits)
