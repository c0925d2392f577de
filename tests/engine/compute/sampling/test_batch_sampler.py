"""The sampler of whole batches beside the one that samples row by row."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import dispatch
from services.engine.compute.device.cpu import HostFetch
from services.engine.compute.device_rounds.results import RoundOutput
from services.engine.compute.sampling.batch_inputs import ALIGNED, build_batch
from services.engine.compute.sampling.batch_sampler import (
    edit_batch,
    sample_batch,
    truncate_batch,
    unpack_masks,
)
from services.engine.compute.sampling.logit_edits import edit_logits
from services.engine.compute.sampling.sampler import Sampler
from services.engine.compute.sampling.sampling_inputs import build_sampling
from services.engine.compute.sampling.truncation import truncate
from services.engine.contract.runner import SamplerOutput, SamplingRow
from services.engine.contract.sampling_params import SamplingParams

KERNELS = dispatch.load("torch")
SIZE = 70
CPU = torch.device("cpu")


def batch_output(logits: torch.Tensor, rows: list[SamplingRow]) -> SamplerOutput:
    inputs = build_batch(rows, logits.shape[1])
    words = torch.from_numpy(inputs.words) if len(inputs.words) else None
    draw = sample_batch(KERNELS, logits, inputs, words)
    fetch = HostFetch([draw.checks, *draw.logprobs])
    return RoundOutput(3, draw.tokens, rows, (), fetch).wait()


def random_row(rng: np.random.Generator, size: int = SIZE) -> SamplingRow:
    """Every option is on in about a third of the rows."""

    def some(count: int) -> tuple[int, ...]:
        picked = rng.choice(size, rng.integers(1, count), replace=False)
        return tuple(int(i) for i in picked) if rng.random() < 1 / 3 else ()

    def maybe(value: float, other: float) -> float:
        return value if rng.random() < 1 / 3 else other

    mask = None
    if rng.random() < 1 / 3:
        mask = rng.integers(-(2**31), 2**31, rng.integers(1, 4)).astype(np.int32)
        mask[0] |= 0b1011
    params = SamplingParams(
        temperature=maybe(0.0, float(rng.uniform(0.2, 2))),
        top_p=maybe(float(rng.uniform(0.05, 0.99)), 1.0),
        top_k=int(maybe(int(rng.integers(1, 12)), 0)),
        min_p=maybe(float(rng.uniform(0.01, 0.5)), 0.0),
        presence_penalty=maybe(0.5, 0.0),
        frequency_penalty=maybe(-0.3, 0.0),
        repetition_penalty=maybe(1.3, 1.0),
        logit_bias=tuple((i, float(rng.normal())) for i in sorted(some(6))),
        allowed_token_ids=tuple({0, 1, 3, *own}) if (own := some(40)) else (),
        bad_token_ids=some(5),
        logprobs=bool(rng.random() < 1 / 3),
        top_logprobs=int(rng.integers(0, 4)),
    )
    history = [int(i) for i in rng.integers(0, size, 12)]
    return SamplingRow(
        params, int(rng.integers(2**63)), 0, 9, tuple(history[:5]), tuple(history[5:]), (2,), mask
    )


@given(st.integers(0, 2**32), st.integers(1, 9))
@settings(max_examples=60, deadline=None)
def test_every_row_gets_what_the_other_sampler_gives(seed: int, count: int) -> None:
    rng = np.random.default_rng(seed)
    rows = [random_row(rng) for _ in range(count)]
    logits = torch.from_numpy(rng.normal(0, 2, (count, SIZE)).astype(np.float32))
    before = logits.clone()
    edited = edit_batch(
        logits.clone(), inputs := build_batch(rows, SIZE), torch.from_numpy(inputs.words)
    )
    for row, own, expected in zip(rows, edited, before.clone(), strict=True):
        edit_logits(expected, row)
        torch.testing.assert_close(own, expected)
    made = batch_output(logits, rows)
    assert torch.equal(logits, before)
    draw = Sampler(KERNELS)(logits, build_sampling(rows, CPU))
    assert made.empty_rows == draw.empty_rows
    for row, own, expected in zip(rows, made.tokens, draw.tokens, strict=True):
        assert own.token_id == expected.token_id, row
        assert (own.logprob is None) == (expected.logprob is None)
        assert own.logprob == pytest.approx(expected.logprob)
        assert [i for i, _ in own.top] == [i for i, _ in expected.top]


@given(st.integers(0, 2**32))
@settings(max_examples=60, deadline=None)
def test_truncation_keeps_what_the_other_one_keeps(seed: int) -> None:
    rng = np.random.default_rng(seed)
    # Halves: many equal scores.
    scores = torch.from_numpy((rng.integers(-8, 8, (6, 40)) / 2).astype(np.float32))
    rows = [random_row(rng, 40) for _ in range(6)]
    cut = [row for row in rows if row.params.temperature > 0]
    inputs = build_batch(rows, 40)
    words = torch.from_numpy(inputs.words)
    at = words[inputs.cut].long()
    own = scores[: len(cut)].index_select(0, at)
    expected = own.clone()
    if not len(at):
        return
    limits = (words[part].view(torch.float32) for part in (inputs.top_p, inputs.min_p))
    truncate_batch(own, words[inputs.top_k].long(), *limits)
    truncate(expected, [cut[i].params for i in at.tolist()])
    assert torch.equal(own, expected)


def test_a_top_p_that_is_reached_exactly_keeps_no_token_more() -> None:
    scores = torch.tensor([[0.5, 0.25, 0.25]]).log()
    half, off = torch.tensor([0.5]), torch.tensor([-math.inf])
    truncate_batch(scores, torch.tensor([3]), half, off)
    assert scores.isfinite().tolist() == [[True, False, False]]


def test_broken_and_empty_rows_are_told_apart() -> None:
    logits = torch.zeros(4, SIZE)
    logits[1, 2], logits[2, 0] = math.nan, math.inf
    nothing = np.zeros(3, np.int32)
    greedy = SamplingParams(temperature=0)
    rows = [SamplingRow(greedy, 0, 0, 0, token_mask=nothing)]
    rows += [SamplingRow(SamplingParams(logprobs=True), 0, 0, 0)] * 2
    rows += [SamplingRow(greedy, 0, 0, 0)]
    made = batch_output(logits, rows)
    assert (made.empty_rows, made.nan_rows) == ((0,), (1, 2))
    assert made.tokens[1].logprob is None
    assert made.tokens[3].token_id == 0


def test_plain_greedy_rows_need_no_words() -> None:
    rows = [SamplingRow(SamplingParams(temperature=0), 0, 0, 0)] * 3
    assert len(build_batch(rows, SIZE).words) == 0
    assert [t.token_id for t in batch_output(torch.eye(3, SIZE), rows).tokens] == [0, 1, 2]


def test_masks_are_unpacked_lowest_bit_first() -> None:
    words = torch.tensor([[-(2**31) | 1, 0b101], [0, 0]], dtype=torch.int32)
    assert unpack_masks(words, 40).nonzero().tolist() == [[0, 0], [0, 31], [0, 32], [0, 34]]


def test_parts_begin_where_wide_loads_may() -> None:
    rng = np.random.default_rng(1)
    inputs = build_batch([random_row(rng) for _ in range(7)], SIZE)
    places = [getattr(inputs, name) for name in inputs.__slots__]
    assert all(part.start % ALIGNED == 0 for part in places if isinstance(part, slice))
