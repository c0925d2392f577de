"""Samples a whole batch on the device; the host reads nothing until the results are fetched.

The steps and formulas are those of sampler.py, which samples row by row on a CPU; here each step is
a few operators for all rows. A row's result depends on that row alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.interface import Kernels
from services.engine.compute.sampling.batch_inputs import BatchInputs, floats, has, ids
from services.engine.contract.runner import SampledToken

_NEVER = float("-inf")


@dataclass(frozen=True, slots=True)
class BatchDraw:
    """The results of R rows, on the device."""

    tokens: Tensor
    """[R] int64."""
    checks: Tensor
    """[R, 3] int32: the token, and the bits of two floats: the highest raw logit (NaN if there is
    a NaN), and the highest after the edits."""
    logprobs: tuple[Tensor, ...]
    """Of the L rows that report them: [L] float32 of the token, and [L, num_top] int64 and float32
    of the likeliest ids; empty if no row does."""


def sample_batch(
    kernels: Kernels, logits: Tensor, inputs: BatchInputs, words: Tensor | None
) -> BatchDraw:
    """Sample one token per row of logits [R, V] float32, which stay unchanged.

    Args:
        words: `inputs.words` on the device; None if there are none.
    """
    best = kernels.arg_max(logits)
    highest = _at(logits, best)
    tokens, top = best, highest
    if words is not None:
        edited = edit_batch(logits.clone(), inputs, words) if inputs.edited else logits
        if inputs.edited:
            tokens = kernels.arg_max(edited)
            top = _at(edited, tokens)
        if has(inputs.drawn):
            tokens = _draw(kernels, edited, tokens, inputs, words)
    reported: tuple[Tensor, ...] = ()
    if words is not None and has(inputs.logprobs):
        rows = ids(words, inputs.logprobs)
        own = tokens.index_select(0, rows)
        reported = batch_logprobs(logits.index_select(0, rows), own, inputs.num_top)
    bits = (tokens.int(), highest.view(torch.int32), top.view(torch.int32))
    return BatchDraw(tokens, torch.stack(bits, 1), reported)


def edit_batch(logits: Tensor, inputs: BatchInputs, words: Tensor) -> Tensor:
    """Apply bias, penalties and masks to logits [R, V], in place; returns them.

    Masks come last, so that nothing can make a forbidden id possible again.
    """
    flat = logits.view(-1)
    if has(inputs.bias_at):
        at = ids(words, inputs.bias_at)
        flat.index_copy_(0, at, flat.index_select(0, at) + floats(words, inputs.biases))
    if has(inputs.repeated_at):
        at, factors = ids(words, inputs.repeated_at), floats(words, inputs.factors)
        old = flat.index_select(0, at)
        flat.index_copy_(0, at, torch.where(old > 0, old / factors, old * factors))
    if has(inputs.counted_at):
        at = ids(words, inputs.counted_at)
        flat.index_copy_(0, at, flat.index_select(0, at) - floats(words, inputs.drops))
    if has(inputs.masked_rows):
        rows = ids(words, inputs.masked_rows)
        allowed = unpack_masks(words[inputs.masks].view(len(rows), -1), logits.shape[1])
        kept = logits.index_select(0, rows).masked_fill_(~allowed, _NEVER)
        logits.index_copy_(0, rows, kept)
    if has(inputs.forbidden_at):
        flat.index_fill_(0, ids(words, inputs.forbidden_at), _NEVER)
    return logits


def unpack_masks(masks: Tensor, size: int) -> Tensor:
    """Allowed ids [rows, size] bool from words [rows, ceil(size / 32)] int32, lowest bit first."""
    bits = torch.arange(32, dtype=torch.int32, device=masks.device)
    return (masks.unsqueeze(-1) >> bits).bitwise_and_(1).view(len(masks), -1)[:, :size].bool()


def truncate_batch(scores: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> None:
    """Set the scores of dropped ids to -inf, in place; see truncation.py for the rules.

    Args:
        scores: [rows, V] float32, already divided by the temperature.
        top_k: [rows] int64, 1 to V.
        top_p: [rows] float32; above 1 keeps everything.
        min_p: [rows] float32, logarithms.
    """
    ranked = scores.sort(dim=-1, descending=True).values
    place = torch.arange(scores.shape[1], device=scores.device)
    within = place < top_k.unsqueeze(1)
    left = ranked.masked_fill(~within, _NEVER)
    shares = (left - left.logsumexp(-1, keepdim=True)).exp()
    before = shares.cumsum(-1).roll(1, -1)
    before[:, 0].zero_()
    kept = (within & (before < top_p.unsqueeze(1))).sum(-1, keepdim=True).clamp_(min=1)
    best = ranked[:, :1]
    lowest = torch.maximum(ranked.gather(1, kept - 1), best + min_p.unsqueeze(1))
    scores.masked_fill_(scores < torch.minimum(lowest, best), _NEVER)


def batch_logprobs(logits: Tensor, tokens: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities of one id per row, and ids and values of the `num_top` likeliest.

    Args:
        logits: [rows, V].
        tokens: [rows] int64.

    Returns:
        [rows] float32, [rows, num_top] int64, [rows, num_top] float32.
    """
    logprobs = logits.log_softmax(-1)
    best = logprobs.topk(num_top)
    return _at(logprobs, tokens), best.indices, best.values


def read_logprobs(tokens: Sequence[int], fetched: Sequence[Tensor]) -> list[SampledToken]:
    """Entries from what `batch_logprobs` returned, on the host."""
    own, ids_, values = (tensor.tolist() for tensor in fetched)
    return [
        SampledToken(token, logprob, tuple(zip(i, v, strict=True)))
        for token, logprob, i, v in zip(tokens, own, ids_, values, strict=True)
    ]


def _draw(
    kernels: Kernels, edited: Tensor, tokens: Tensor, inputs: BatchInputs, words: Tensor
) -> Tensor:
    rows = ids(words, inputs.drawn)
    scores = edited.index_select(0, rows)
    scores.div_(floats(words, inputs.temperatures).unsqueeze(1))
    if has(inputs.cut):
        cut = ids(words, inputs.cut)
        some = scores.index_select(0, cut)
        limits = floats(words, inputs.top_p), floats(words, inputs.min_p)
        truncate_batch(some, ids(words, inputs.top_k), *limits)
        scores.index_copy_(0, cut, some)
    drawn = kernels.sample(scores, words[inputs.keys].view(-1, 2))
    return tokens.index_copy(0, rows, drawn)


def _at(scores: Tensor, tokens: Tensor) -> Tensor:
    """[rows]: the score of one id per row."""
    return scores.gather(1, tokens.unsqueeze(1)).squeeze(1)
