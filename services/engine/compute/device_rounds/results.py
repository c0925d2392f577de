"""What a round leaves on the device, and what its copies to the host become."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from torch import Tensor

from services.engine.compute.device.interface import Fetch
from services.engine.compute.sampling.batch_sampler import read_logprobs
from services.engine.contract.runner import SampledToken, SamplerOutput, SamplingRow


class ScoredRows(NamedTuple):
    """Log-probabilities of prompt tokens of one sequence, on the device."""

    seq_id: int
    targets: tuple[int, ...]
    chunks: tuple[tuple[Tensor, ...], ...]
    """What `batch_logprobs` returned, some rows at a time."""


@dataclass(frozen=True, slots=True)
class DeviceHidden:
    """What the forward of a round leaves for the sampler."""

    logits: Tensor
    """[sampled, vocabulary] float32."""
    prompts: tuple[ScoredRows, ...]


class RoundOutput:
    """See PendingOutput."""

    def __init__(
        self,
        step: int,
        device_tokens: Tensor | None,
        rows: Sequence[SamplingRow],
        prompts: Sequence[ScoredRows],
        fetch: Fetch,
    ) -> None:
        """
        Args:
            rows: those that were sampled.
            fetch: of `checks` and, if a row reports them, `logprobs` of a BatchDraw; then of all
                chunks of all prompts.
        """
        self.device_tokens = device_tokens
        self._step, self._rows, self._prompts = step, tuple(rows), tuple(prompts)
        self._fetch: Fetch | None = fetch
        self._output: SamplerOutput | None = None

    def wait(self) -> SamplerOutput:
        """See PendingOutput."""
        if self._output is None:
            assert self._fetch is not None
            self._output = self._read(list(self._fetch.wait()))
            self._fetch = None
        return self._output

    def _read(self, arrived: list[Tensor]) -> SamplerOutput:
        tokens: list[SampledToken] = []
        broken: tuple[int, ...] = ()
        empty: tuple[int, ...] = ()
        if self._rows:
            checks = arrived.pop(0).numpy()
            scores = np.ascontiguousarray(checks[:, 1:]).view(np.float32).tolist()
            broken = tuple(i for i, (raw, _) in enumerate(scores) if not math.isfinite(raw))
            empty = tuple(
                i for i, (_, top) in enumerate(scores) if top == -math.inf and i not in broken
            )
            tokens = [SampledToken(token) for token in checks[:, 0].tolist()]
            self._add_logprobs(tokens, broken, arrived)
        return SamplerOutput(
            step=self._step,
            tokens=tuple(tokens),
            device_tokens=self.device_tokens,
            prompt_logprobs=tuple((own.seq_id, _scores(own, arrived)) for own in self._prompts),
            nan_rows=broken,
            empty_rows=empty,
        )

    def _add_logprobs(
        self, tokens: list[SampledToken], broken: Sequence[int], arrived: list[Tensor]
    ) -> None:
        wanted = [index for index, row in enumerate(self._rows) if row.params.logprobs]
        if not wanted:
            return
        fetched, arrived[:3] = arrived[:3], []
        entries = read_logprobs([tokens[index].token_id for index in wanted], fetched)
        for index, entry in zip(wanted, entries, strict=True):
            if index not in broken:
                top = entry.top[: self._rows[index].params.top_logprobs]
                tokens[index] = SampledToken(entry.token_id, entry.logprob, top)


def _scores(own: ScoredRows, arrived: list[Tensor]) -> tuple[SampledToken, ...]:
    entries: list[SampledToken] = []
    for _ in own.chunks:
        fetched, arrived[:3] = arrived[:3], []
        targets = own.targets[len(entries) : len(entries) + len(fetched[0])]
        entries += read_logprobs(targets, fetched)
    return tuple(entries)
