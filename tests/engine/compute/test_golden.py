"""Greedy float32 tokens of the real model through `LLM`, against transformers' (see
scripts/make_golden.py): alone, batched, in chunks, and on a warm prefix."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from services.engine.contract.sampling_params import SamplingParams
from services.engine.offline.llm import LLM

pytestmark = pytest.mark.model

DATA = Path(__file__).parents[2] / "data"
GOLDEN = json.loads((DATA / "smollm2_golden.json").read_text(encoding="utf-8"))
ITEMS = GOLDEN["items"]
FIRST = json.loads((DATA / "smollm2_first_golden.json").read_text(encoding="utf-8"))["items"]
# A slow machine needs longer than the suite's default; every test here takes seconds on a free one.
SLOW = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(threads=1, num_blocks=400, block_size=16, max_num_batched_tokens=512) as made:
        yield made


@pytest.fixture(scope="module")
def small_chunks() -> Iterator[LLM]:
    with LLM(threads=1, num_blocks=400, block_size=32, max_num_batched_tokens=32) as made:
        yield made


def _params(item: dict, **fields: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=len(item["output_ids"]), **fields)


def _tokens(llm: LLM, items: list[dict], **fields: Any) -> list[list[int]]:
    prompts = [item["prompt_ids"] for item in items]
    outputs = llm.generate(prompts, [_params(item, **fields) for item in items])
    return [list(output.choices[0].token_ids) for output in outputs]


def _want(items: list[dict]) -> list[list[int]]:
    return [item["output_ids"] for item in items]


def test_the_data_is_what_the_tests_need() -> None:
    lengths = sorted(len(item["prompt_ids"]) for item in ITEMS)
    assert len(ITEMS) == 23
    assert lengths[0] <= 7
    assert lengths[-1] >= 400
    assert sum(len(item["output_ids"]) for item in ITEMS) > 400
    assert [item["prompt_ids"] for item in ITEMS[:3]] == [item["prompt_ids"] for item in FIRST]


@SLOW
@pytest.mark.parametrize("index", range(len(ITEMS)))
def test_alone(llm: LLM, index: int) -> None:
    assert _tokens(llm, [ITEMS[index]], cache_bypass=True) == _want([ITEMS[index]])


@SLOW
@pytest.mark.parametrize("first", [0, 8, 15])
def test_in_a_batch_of_eight(llm: LLM, first: int) -> None:
    items = ITEMS[first : first + 8]
    assert _tokens(llm, items, cache_bypass=True) == _want(items)


@SLOW
def test_in_chunks_of_32(small_chunks: LLM) -> None:
    items = sorted(ITEMS, key=lambda item: len(item["prompt_ids"]))[-8:]
    assert len(items[0]["prompt_ids"]) > 32
    assert _tokens(small_chunks, items, cache_bypass=True) == _want(items)


@SLOW
def test_on_a_warm_prefix(llm: LLM) -> None:
    item = max(ITEMS, key=lambda item: len(item["prompt_ids"]))
    _tokens(llm, [item])
    (output,) = llm.generate([item["prompt_ids"]], _params(item))
    assert list(output.choices[0].token_ids) == item["output_ids"]
    assert output.num_cached_tokens >= len(item["prompt_ids"]) // 16 * 16 - 16


@SLOW
def test_logprobs_are_those_of_transformers(llm: LLM) -> None:
    for item in FIRST:
        (output,) = llm.generate([item["prompt_ids"]], _params(item, logprobs=True))
        entries = output.choices[0].logprobs
        got = [entry.logprob for entry in entries]
        assert got == pytest.approx(item["output_logprobs"], abs=2e-3)
