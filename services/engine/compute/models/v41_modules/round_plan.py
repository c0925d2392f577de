"""Where the rows of one round read and write: V4's plan, and the tokens for look-ups."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from services.engine.compute.models.v4_modules.round_plan import (
    Lines,
    RingPlan,
    RoundPlan,
    plan_ring,
    plan_round,
    ring_length,
)
from services.engine.contract.deepseek_v41 import DeepseekV41Config
from services.engine.contract.runner import SequenceMetadata


@dataclass(frozen=True, slots=True)
class EarlierTokens:
    """Tokens before replayed positions, which the ring does not have yet."""

    tokens: Tensor
    """[N] int64."""
    slots: Tensor
    """[N] int64."""
    places: Tensor
    """[N] int64: in the ring."""


@dataclass(frozen=True, slots=True)
class V41Plan:
    """The rows of one round; T rows."""

    rows: RoundPlan
    tokens: RingPlan
    """Of the latest tokens."""
    look_back: Tensor
    """[T, longest n-gram] int64: rows of the pool of tokens up to each row's own, oldest first."""
    before: Tensor
    """[T, longest n-gram] bool: the position is before the first one."""
    earlier: EarlierTokens


def plan_v41(
    config: DeepseekV41Config,
    requests: Sequence[SequenceMetadata],
    token_ids: Tensor,
    *,
    block_size: int,
    drafts: int = 0,
) -> V41Plan:
    """Lay out one round; see `plan_round`."""
    lines, longest = Lines(requests), config.engram.longest
    ratios = {layer.ratio for layer in config.layers if layer.ratio}
    rows = plan_round(
        requests,
        token_ids,
        window=config.window,
        spans={ratio: ratio for ratio in sorted(ratios)},
        block_size=block_size,
        drafts=drafts,
    )
    look_back, before = lines.pool_rows(lines.requests, lines.positions, longest)
    earlier = _earlier(requests, ring_length(longest, drafts))
    return V41Plan(rows, plan_ring(lines, longest, drafts), look_back, before, earlier)


def _earlier(requests: Sequence[SequenceMetadata], length: int) -> EarlierTokens:
    """Args: length of the ring of tokens."""
    found = [
        (token, request.state_slot, (request.state_from - back) % length)
        for request in requests
        for back, token in enumerate(reversed(request.earlier_tokens), start=1)
    ]
    return EarlierTokens(*torch.tensor(found, dtype=torch.long).view(-1, 3).unbind(1))
