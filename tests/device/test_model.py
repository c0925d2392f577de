"""The real model on a real device: greedy tokens equal the golden, alone and in a batch."""

import json
from pathlib import Path

import pytest
import torch

from services.engine.contract.sampling_params import SamplingParams
from services.engine.offline.llm import LLM

pytestmark = [pytest.mark.gpu, pytest.mark.model]
GOLDEN = Path(__file__).parents[1] / "data" / "smollm2_golden.json"


def test_greedy_tokens_equal_the_golden():
    assert torch.cuda.is_available(), "no CUDA device: make gpu needs one"
    items = json.loads(GOLDEN.read_text())["items"]
    prompts = [item["prompt_ids"] for item in items]
    wanted = [item["output_ids"] for item in items]
    params = [SamplingParams(temperature=0, max_tokens=len(ids)) for ids in wanted]
    with LLM("smollm2-135m-instruct", device="cuda", kv_memory="1GiB") as llm:
        alone = [llm.generate(p, own)[0] for p, own in zip(prompts, params, strict=True)]
        batch = llm.generate(prompts, params)
    assert [list(output.choices[0].token_ids) for output in alone] == wanted
    assert [list(output.choices[0].token_ids) for output in batch] == wanted
