"""Qwen3 with and without experts against transformers (see scripts/make_golden.py), and what of
their files is refused."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from services.common.config import ConfigError
from services.engine.config import EngineConfig
from services.engine.llm import LLM
from services.engine.loader import load_model
from services.engine.loader.tiny_model import TinyShape, write_tiny_model
from services.engine.model_runner import ModelRunner
from services.engine.models.config import ModelFileError
from services.engine.runner import SequenceMetadata
from services.engine.sampling_params import SamplingParams

GOLDEN = json.loads(
    (Path(__file__).parents[2] / "data" / "tiny_qwen3_golden.json").read_text(encoding="utf-8")
)["models"]
MOE = [name for name in GOLDEN if "moe" in name]


def _shape(name: str) -> TinyShape:
    fields = GOLDEN[name]["shape"]
    return TinyShape(**{**fields, "dense_layers": tuple(fields["dense_layers"])})


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("qwen3")
    return {name: write_tiny_model(root / name, _shape(name)) for name in GOLDEN}


def _logits(drive, prompt: list[int], chunk: int) -> torch.Tensor:
    """[chunks, vocabulary]: after each chunk of one sequence."""
    table = drive.table(len(prompt))
    found = []
    for start in range(0, len(prompt), chunk):
        part = tuple(prompt[start : start + chunk])
        meta = SequenceMetadata(0, start, part, None, table, sample=True)
        found.append(drive.runner.execute_main_model(start, [meta], None).logits)
    return torch.cat(found)


@pytest.mark.parametrize("name", GOLDEN)
@pytest.mark.parametrize("fields", [{}, {"deterministic": True}], ids=["default", "deterministic"])
@pytest.mark.parametrize("chunk", [1, 64])
def test_logits_equal_those_of_transformers(
    name: str, fields: dict, chunk: int, drive: Callable, folders: dict
) -> None:
    golden = GOLDEN[name]
    got = _logits(drive(folders[name], block_size=16, **fields), golden["prompt_ids"], chunk)
    want = dict(zip(golden["positions"], golden["logits"], strict=True))
    ends = [min(start + chunk, 200) - 1 for start in range(0, 200, chunk)]
    compared = [(got[row], want[end]) for row, end in enumerate(ends) if end in want]
    assert len(compared) >= 3
    for ours, theirs in compared:
        torch.testing.assert_close(ours, torch.tensor(theirs), atol=5e-4, rtol=2e-4)


@pytest.mark.parametrize("name", GOLDEN)
@pytest.mark.parametrize("chunk", [13, 512])
def test_greedy_tokens_alone_batched_in_chunks_and_on_a_warm_prefix(
    name: str, chunk: int, folders: dict
) -> None:
    items = GOLDEN[name]["items"]
    prompts = [item["prompt_ids"] for item in items]
    params = [
        SamplingParams(temperature=0, max_tokens=len(item["output_ids"]), ignore_eos=True)
        for item in items
    ]
    want = [item["output_ids"] for item in items]
    fields = {"threads": 1, "num_blocks": 128, "block_size": 16, "max_num_batched_tokens": chunk}
    with LLM(str(folders[name]), **fields) as llm:
        batched = llm.generate(prompts, params)
        assert [list(o.choices[0].token_ids) for o in batched] == want
        for prompt, own, tokens in zip(prompts, params, want, strict=True):
            (alone,) = llm.generate([prompt], [own])
            assert list(alone.choices[0].token_ids) == tokens
        assert alone.num_cached_tokens > 0, "the last prompt was not served from its prefix"


@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe"])
def test_half_format_comes_close(name: str, drive: Callable, folders: dict) -> None:
    golden = GOLDEN[name]
    got = _logits(drive(folders[name], dtype="bfloat16"), golden["prompt_ids"][:2], 1)
    want = torch.tensor(golden["logits"][:2])
    # A router may choose another expert where two are nearly equal; early rows are few and far.
    assert torch.nn.functional.cosine_similarity(got, want).min() > 0.98


def test_sparse_step_names_the_same_layers_as_a_list_of_dense_ones(folders: dict, tmp_path) -> None:
    config = json.loads((folders["qwen3_moe_mixed"] / "config.json").read_text())
    config |= {"mlp_only_layers": [], "decoder_sparse_step": 2}
    folder = write_tiny_model(tmp_path / "m", _shape("qwen3_moe_mixed"))
    (folder / "config.json").write_text(json.dumps(config))
    assert load_model(str(folder)).config.moe.layers == (1,)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        ({"num_experts_per_tok": 9}, "9 of 8 experts cannot be chosen"),
        ({"mlp_only_layers": [0, 1]}, "no layer has experts"),
        ({"use_sliding_window": True}, "use_sliding_window is not supported"),
        ({"attention_bias": True}, "attention_bias is not supported"),
        ({"model_type": "mixtral"}, "model_type 'mixtral' is not supported, only 'llama', 'qwen3'"),
        ({"moe_intermediate_size": 31}, "experts.0.gate_proj.weight' has shape"),
        ({"num_experts": 9}, "experts.8.gate_proj.weight' is missing"),
        ({"num_experts": 7, "num_local_experts": 7}, "tensors without a place in the model"),
    ],
    ids=str,
)
def test_files_that_cannot_be_served(tmp_path: Path, edit: dict, message: str) -> None:
    folder = write_tiny_model(tmp_path / "m", TinyShape(kind="qwen3_moe"))
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | edit))
    if "num_experts" in edit:  # so that the router fits and the experts are what is wrong
        weights = load_file(folder / "model.safetensors")
        for layer in range(2):
            name = f"model.layers.{layer}.mlp.gate.weight"
            weights[name] = torch.zeros(edit["num_experts"], weights[name].shape[1])
        save_file(weights, folder / "model.safetensors")
    with pytest.raises(ModelFileError, match=message):
        ModelRunner(EngineConfig(model=str(folder)))


def test_a_dense_model_takes_no_expert_settings(folders: dict) -> None:
    for fields in ({"expert_parallel": 2}, {"redundant_experts": 1}):
        with pytest.raises(ConfigError, match="the model has no experts"):
            ModelRunner(EngineConfig(model=str(folders["qwen3"]), **fields))


def test_slots_must_divide_among_ranks(folders: dict) -> None:
    config = EngineConfig(model=str(folders["qwen3_moe"]), expert_parallel=3, redundant_experts=2)
    with pytest.raises(ConfigError, match=r"redundant_experts=2.*10 slots, which 3 ranks"):
        ModelRunner(config)
