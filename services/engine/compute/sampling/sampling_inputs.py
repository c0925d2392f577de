"""The sampling parameters of one round as tensors; built once, read by the sampler."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from services.engine.compute.sampling.noise import row_key
from services.engine.contract.runner import SampledToken, SamplingRow


@dataclass(frozen=True, slots=True)
class Hidden:
    """What the forward of a round leaves for the sampler."""

    logits: Tensor
    """[sampled, vocabulary] float32."""
    prompt: tuple[tuple[int, tuple[SampledToken, ...]], ...]
    """seq_id and log-probabilities of prompt tokens, of each sequence that reports them."""


@dataclass(frozen=True, slots=True)
class SamplingInputs:
    """R rows; all tensors are on the device of the logits."""

    rows: tuple[SamplingRow, ...]
    plain_greedy: bool
    """Every row is the arg-max of its raw logits: no row is edited or drawn."""
    edited: tuple[int, ...]
    """Rows whose logits are changed before the temperature."""
    drawn: Tensor | None
    """[drawn] int64: rows with a temperature above 0; None if all rows are greedy."""
    temperatures: Tensor
    """[drawn, 1] float32."""
    keys: Tensor
    """[drawn, 2] int32: keys of the noise."""
    logprobs: tuple[int, ...]
    """Rows that report log-probabilities."""
    num_top: int
    """Alternatives that a row reports, at most."""

    @property
    def drawn_rows(self) -> tuple[SamplingRow, ...]:
        """The rows of `drawn`."""
        return tuple(row for row in self.rows if row.params.temperature > 0)


def build_sampling(rows: Sequence[SamplingRow], device: torch.device) -> SamplingInputs:
    """Collect the rows' parameters."""
    drawn = [index for index, row in enumerate(rows) if row.params.temperature > 0]
    edited = tuple(index for index, row in enumerate(rows) if is_edited(row))
    keys = [row_key(rows[i].seed, rows[i].choice, rows[i].position) for i in drawn]
    temperatures = [[rows[i].params.temperature] for i in drawn]
    logprobs = tuple(index for index, row in enumerate(rows) if row.params.logprobs)
    return SamplingInputs(
        rows=tuple(rows),
        plain_greedy=not drawn and not edited,
        edited=edited,
        drawn=torch.tensor(drawn, device=device) if drawn else None,
        temperatures=torch.tensor(temperatures, dtype=torch.float32, device=device),
        keys=torch.tensor(keys, dtype=torch.int32, device=device),
        logprobs=logprobs,
        num_top=max((rows[i].params.top_logprobs for i in logprobs), default=0),
    )


def is_edited(row: SamplingRow) -> bool:
    """Whether a mask, bias or penalty changes the row's logits."""
    params = row.params
    return bool(
        params.logit_bias
        or params.allowed_token_ids
        or params.bad_token_ids
        or row.forbid_token_ids
        or row.token_mask is not None
        or params.has_penalty
    )
