"""The sampler: edits, truncation, statistics of the draw, reports."""

import math
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import dispatch
from services.engine.compute.sampling.logit_edits import edit_logits, unpack_mask
from services.engine.compute.sampling.noise import row_key
from services.engine.compute.sampling.sampler import Draw, Sampler
from services.engine.compute.sampling.sampling_inputs import build_sampling
from services.engine.compute.sampling.truncation import PARTIAL_SORT, truncate
from services.engine.contract.runner import SamplingRow
from services.engine.contract.sampling_params import SamplingParams

KERNELS = dispatch.load("torch")
CPU = torch.device("cpu")
NEVER = float("-inf")


def _row(seed: int = 0, position: int = 0, choice: int = 0, **params) -> SamplingRow:
    history = {
        key: params.pop(key)
        for key in ("prompt_token_ids", "output_token_ids", "forbid_token_ids", "token_mask")
        if key in params
    }
    return SamplingRow(SamplingParams(**params), seed, choice, position, **history)


def _draw(logits: torch.Tensor, rows: list[SamplingRow], *, one_by_one: bool = False) -> Draw:
    return Sampler(KERNELS, one_by_one=one_by_one)(logits, build_sampling(rows, CPU))


def _ids(logits: torch.Tensor, rows: list[SamplingRow]) -> list[int]:
    return [token.token_id for token in _draw(logits, rows).tokens]


def _edited(logits: list[float], **fields) -> list[float]:
    tensor = torch.tensor(logits)
    edit_logits(tensor, _row(**fields))
    return [round(value, 4) for value in tensor.tolist()]


def _many(logits: list[float], count: int, **params) -> Counter:
    """Ids that `count` positions of one request draw from the same logits."""
    rows = [_row(seed=11, position=p, **params) for p in range(count)]
    scores = torch.tensor(logits, dtype=torch.float32)
    return Counter(_ids(scores.expand(count, -1).clone(), rows))


def _chi_square(counts: Counter, expected: dict[int, float]) -> float:
    total = sum(counts.values())
    assert set(counts) <= set(expected)
    return sum((counts[i] - total * p) ** 2 / (total * p) for i, p in expected.items())


def test_greedy_takes_the_lowest_id_of_equals() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 0.0], [5.0, 5.0, 5.0, 5.0]])
    assert _ids(logits, [_row(temperature=0)] * 2) == [1, 0]


def test_draws_follow_softmax() -> None:
    logits = [2.0, 1.0, 0.0, -1.0, 0.5]
    probabilities = torch.tensor(logits).div(0.8).softmax(0).tolist()
    counts = _many(logits, 20_000, temperature=0.8)
    # 4 degrees of freedom: 23.5 is exceeded once in 10,000 fair experiments; the seed is fixed.
    assert _chi_square(counts, dict(enumerate(probabilities))) < 23.5
    assert _chi_square(counts, dict.fromkeys(range(5), 0.2)) > 1000


def test_a_high_temperature_makes_draws_alike() -> None:
    assert _many([5.0, 0.0], 64, temperature=1.0)[1] < 8 < _many([5.0, 0.0], 64, temperature=50)[1]


def test_rare_tokens_are_drawn_as_rarely_as_they_should() -> None:
    vocabulary = 4096
    logits = torch.zeros(vocabulary)
    logits[7] = 12.0
    rows = [_row(seed=3, position=p) for p in range(4000)]
    ids = [
        i for at in range(0, 4000, 500) for i in _ids(logits.expand(500, -1), rows[at : at + 500])
    ]
    others = 4000 * (vocabulary - 1) / (vocabulary - 1 + math.exp(12.0))
    assert abs(sum(i != 7 for i in ids) - others) < 5 * math.sqrt(others)


def test_seed_choice_and_position_each_change_the_noise() -> None:
    keys = {
        row_key(seed, choice, position, purpose)
        for seed in (0, 1, 2**64 - 1)
        for choice in range(4)
        for position in range(64)
        for purpose in (1, 2)
    }
    assert len(keys) == 3 * 4 * 64 * 2
    assert all(-(2**31) <= word < 2**31 for key in keys for word in key)
    # These never change: streams must repeat after an upgrade.
    assert row_key(42, 0, 7) == (913018968, 2024575932)


@pytest.mark.parametrize("top_p", [1e-9, 1e-3])
def test_a_tiny_top_p_is_the_arg_max(top_p: float) -> None:
    assert _many([0.0, 0.1, 0.2, 0.3], 100, temperature=2.0, top_p=top_p) == {3: 100}


def test_top_k_one_is_the_arg_max() -> None:
    assert _many([0.0, 0.1, 0.2, 0.3], 100, temperature=2.0, top_k=1) == {3: 100}


def test_truncated_draws_follow_the_renormalised_distribution() -> None:
    logits = torch.tensor([0.4, 0.3, 0.2, 0.07, 0.03]).log().tolist()
    kept = {0: 0.4 / 0.9, 1: 0.3 / 0.9, 2: 0.2 / 0.9}
    for params in ({"top_k": 3}, {"top_p": 0.71}, {"min_p": 0.45}):
        assert _chi_square(_many(logits, 6000, **params), kept) < 18.4, params


def _kept(scores: list[float], **params) -> list[int]:
    row = torch.tensor([scores])
    truncate(row, [SamplingParams(**params)])
    return row[0].isfinite().nonzero().flatten().tolist()


def test_top_p_counts_after_top_k() -> None:
    scores = torch.tensor([0.4, 0.3, 0.2, 0.1]).log().tolist()
    assert _kept(scores, top_p=0.75) == [0, 1, 2]
    # Among the two likeliest, 0.4 / 0.7 and 0.3 / 0.7: the first alone is 0.57.
    assert _kept(scores, top_k=2, top_p=0.57) == [0]
    assert _kept(scores, top_k=2, top_p=0.58) == [0, 1]


def test_min_p_is_a_fraction_of_the_likeliest() -> None:
    scores = torch.tensor([0.4, 0.3, 0.19, 0.11]).log().tolist()
    assert _kept(scores, min_p=0.5) == [0, 1]


def test_equal_scores_stay_together() -> None:
    assert _kept([1.0, 1.0, 1.0, 0.0], top_k=2) == [0, 1, 2]
    assert _kept([0.0] * 10, top_p=0.1) == list(range(10))
    assert _kept([0.0, 1.0], min_p=1.0) == [1]


@given(
    st.lists(st.floats(-20, 20, width=32), min_size=2, max_size=40),
    st.integers(0, 45),
    st.floats(0.01, 1),
    st.floats(0, 1),
)
@settings(max_examples=200, deadline=None)
def test_truncation_keeps_what_the_definitions_keep(
    scores: list[float], top_k: int, top_p: float, min_p: float
) -> None:
    ranked = sorted(scores, reverse=True)
    lowest = ranked[min(top_k, len(ranked)) - 1] if top_k else NEVER
    left = [s for s in ranked if s >= lowest][: top_k or None]
    weights = np.exp(np.array(left, dtype=np.float64) - left[0])
    before = np.concatenate(([0.0], np.cumsum(weights / weights.sum())[:-1]))
    assume_clear = np.abs(before - top_p).min() > 1e-5
    lowest = max(lowest, left[max(1, int((before < top_p).sum())) - 1]) if top_p < 1 else lowest
    floor = ranked[0] + math.log(min_p) if min_p else NEVER
    clear = assume_clear and all(abs(score - floor) > 1e-4 for score in scores[1:])
    want = [i for i, s in enumerate(scores) if s >= max(lowest, floor) or s == ranked[0]]
    if clear:
        assert _kept(scores, top_k=top_k, top_p=top_p, min_p=min_p) == want


def test_a_wide_nucleus_is_found_beyond_the_partial_sort() -> None:
    size = PARTIAL_SORT * 4
    scores = torch.linspace(0, -0.01, size)
    kept = _kept(scores.tolist(), top_p=0.9)
    assert kept == list(range(len(kept)))
    assert abs(len(kept) / size - 0.9) < 0.01


def test_penalties_follow_their_definitions() -> None:
    history = {"prompt_token_ids": (0, 4), "output_token_ids": (1, 1, 2)}
    logits = [2.0, 2.0, -2.0, 1.0, -1.0]
    assert _edited(logits, frequency_penalty=0.5, **history) == [2.0, 1.0, -2.5, 1.0, -1.0]
    assert _edited(logits, presence_penalty=0.5, **history) == [2.0, 1.5, -2.5, 1.0, -1.0]
    assert _edited(logits, repetition_penalty=2.0, **history) == [1.0, 1.0, -4.0, 1.0, -2.0]
    assert _edited(logits, presence_penalty=1.0, repetition_penalty=2.0) == logits


def test_bias_and_masks() -> None:
    logits = [1.0, 2.0, 3.0, 4.0]
    assert _edited(logits, logit_bias=((0, 100.0), (3, -1.5))) == [101.0, 2.0, 3.0, 2.5]
    assert _edited(logits, allowed_token_ids=(1, 2)) == [NEVER, 2.0, 3.0, NEVER]
    assert _edited(logits, bad_token_ids=(3,)) == [1.0, 2.0, 3.0, NEVER]
    assert _edited(logits, forbid_token_ids=(2, 3)) == [1.0, 2.0, NEVER, NEVER]
    # Nothing lifts a forbidden id.
    assert _edited(logits, logit_bias=((3, 100.0),), bad_token_ids=(3,))[3] == NEVER


def test_grammar_words_hold_one_bit_a_token() -> None:
    words = np.zeros(2, dtype=np.int32)
    words[0] = np.int32(-(2**31)) | 1
    words[1] = 0b101
    allowed = unpack_mask(words, torch.zeros(70)).nonzero().flatten().tolist()
    assert allowed == [0, 31, 32, 34]
    logits = torch.arange(70.0).unsqueeze(0)
    assert _ids(logits, [_row(temperature=0, token_mask=words)]) == [34]
    assert set(_many(list(range(40)), 50, temperature=2.0, token_mask=words)) <= {0, 31, 32, 34}


def test_an_empty_mask_is_distinguished_from_broken_logits() -> None:
    logits = torch.zeros(3, 4)
    logits[1, 2] = float("nan")
    nothing = np.zeros(1, dtype=np.int32)
    rows = [_row(temperature=0, token_mask=nothing), _row(logprobs=True), _row(temperature=0)]
    draw = _draw(logits, rows)
    assert draw.empty_rows == (0,)
    assert draw.nan_rows == (1,)
    assert draw.tokens[1].logprob is None
    logits[2, 0] = float("inf")
    assert _draw(logits, [_row(temperature=0)] * 3).nan_rows == (1, 2)


def test_logprobs_are_of_the_raw_logits() -> None:
    logits = torch.tensor([[1.0, 2.0, 3.0, 0.0], [0.0, 0.0, 0.0, 9.0]])
    rows = [
        _row(temperature=0, logprobs=True, top_logprobs=2, bad_token_ids=(2,)),
        _row(temperature=0, logprobs=True),
    ]
    first, second = _draw(logits, rows).tokens
    want = logits.log_softmax(-1)
    assert first.token_id == 1
    assert first.logprob == pytest.approx(want[0, 1].item())
    assert [token for token, _ in first.top] == [2, 1]
    assert second.top == ()
    assert second.logprob == pytest.approx(want[1, 3].item())


def test_rows_do_not_depend_on_one_another() -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(12, 997, generator=generator) * 3
    kinds = (
        {"temperature": 0},
        {"temperature": 0.7, "top_p": 0.9},
        {"temperature": 1.2, "top_k": 30},
        {"temperature": 1.0, "repetition_penalty": 1.5, "output_token_ids": (1, 2, 3)},
    )
    rows = [_row(seed=i % 3, position=i, choice=i % 2, **kinds[i % 4]) for i in range(12)]
    together = _ids(logits, rows)
    assert together == [_ids(logits[i : i + 1], [rows[i]])[0] for i in range(12)]
    apart = _draw(logits, rows, one_by_one=True)
    assert together == [token.token_id for token in apart.tokens]
    before = logits.clone()
    _draw(logits, rows)
    assert torch.equal(logits, before)


@pytest.mark.parametrize("top_k", [0, 3])
def test_top_p_that_is_reached_exactly_keeps_no_token_more(top_k: int) -> None:
    scores = torch.tensor([0.5, 0.25, 0.25]).log()
    # The case is exact in float32 too, or it would show nothing.
    assert (scores - scores.logsumexp(0)).exp().tolist() == [0.5, 0.25, 0.25]
    assert _kept(scores.tolist(), top_p=0.5, top_k=top_k) == [0]
