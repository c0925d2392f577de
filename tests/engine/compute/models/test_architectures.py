"""Every architecture and variant against transformers (see scripts/make_golden.py), and what of
their files is refused."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from services.common.config.settings import ConfigError
from services.engine.compute.expert_parallel.leader import ExpertLeader
from services.engine.compute.loader import load_model
from services.engine.compute.model_runner import ModelRunner
from services.engine.contract.config import EngineConfig
from services.engine.contract.model_config import ModelFileError
from services.engine.contract.runner import SequenceMetadata
from services.engine.contract.sampling_params import SamplingParams
from services.engine.offline.llm import LLM
from tests.doubles.tiny_model import TinyShape, write_tiny_model

DATA = Path(__file__).parents[3] / "data"
GOLDEN = {
    name: model
    for file in ("tiny_qwen3_golden.json", "tiny_variants_golden.json")
    for name, model in json.loads((DATA / file).read_text(encoding="utf-8"))["models"].items()
}
WINDOWS = {"mistral_window": 2, "qwen2_window": 2, "qwen3_window_bias": 1, "qwen3_moe_window": 2}


def _shape(name: str) -> TinyShape:
    fields = GOLDEN[name]["shape"]
    return TinyShape(**{**fields, "dense_layers": tuple(fields["dense_layers"])})


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("architectures")
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


# Decoding alone (chunk 1) takes long: the tiled mode does it where tiles are few or masked.
WAYS = [
    (name, deterministic, chunk)
    for name in GOLDEN
    for deterministic, chunk in ((False, 1), (False, 64), (True, 64), (True, 1))
    if (deterministic, chunk) != (True, 1) or name in ("qwen3", "mistral_window", "llama_bias")
]


@pytest.mark.parametrize(("name", "deterministic", "chunk"), WAYS)
def test_logits_equal_those_of_transformers(
    name: str, deterministic: bool, chunk: int, drive: Callable, folders: dict
) -> None:
    golden = GOLDEN[name]
    run = drive(folders[name], block_size=16, deterministic=deterministic)
    got = _logits(run, golden["prompt_ids"], chunk)
    want = dict(zip(golden["positions"], golden["logits"], strict=True))
    ends = [min(start + chunk, 200) - 1 for start in range(0, 200, chunk)]
    compared = [(got[row], want[end]) for row, end in enumerate(ends) if end in want]
    assert len(compared) >= 3
    for ours, theirs in compared:
        torch.testing.assert_close(ours, torch.tensor(theirs), atol=5e-4, rtol=2e-4)


@pytest.mark.parametrize("deterministic", [False, True])
def test_experts_without_compiled_rounds_give_the_logits_of_transformers(
    deterministic: bool, drive: Callable, folders: dict
) -> None:
    """Other ranks, replicas of experts and other processors need this path."""
    golden = GOLDEN["qwen3_moe"]
    run = drive(folders["qwen3_moe"], kernels="torch", deterministic=deterministic)
    got = _logits(run, golden["prompt_ids"], 64)
    want = dict(zip(golden["positions"], golden["logits"], strict=True))
    for row, end in enumerate((63, 127, 191, 199)):
        if end in want:
            torch.testing.assert_close(got[row], torch.tensor(want[end]), atol=5e-4, rtol=2e-4)
    assert isinstance(run.runner._experts, ExpertLeader)


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


@pytest.mark.parametrize("name", WINDOWS)
def test_the_windows_are_shorter_than_what_is_compared(name: str, folders: dict) -> None:
    config = load_model(str(folders[name])).config
    assert 0 < config.sliding_window < 100
    assert len(config.sliding_layers) == WINDOWS[name]
    assert sum(len(item["output_ids"]) > 5 for item in GOLDEN[name]["items"][-2:]) == 2


@pytest.mark.parametrize("name", GOLDEN)
@pytest.mark.parametrize(("dtype", "least"), [("bfloat16", 0.999), ("float16", 0.9999)])
def test_half_formats_come_close(
    name: str, dtype: str, least: float, drive: Callable, folders: dict
) -> None:
    """Cosine with float32's logits. A router may choose another expert where two are nearly equal:
    with experts the early rows alone are compared."""
    golden = GOLDEN[name]
    rows = 2 if "moe" in name else 6
    ends = golden["positions"][:rows]
    run = drive(folders[name], dtype=dtype, block_size=16)
    prompt = golden["prompt_ids"]
    table = run.table(len(prompt))
    got, start = [], 0
    for step, end in enumerate(ends):
        part = tuple(prompt[start : end + 1])
        meta = SequenceMetadata(0, start, part, None, table, sample=True)
        got.append(run.runner.execute_main_model(step, [meta], None).logits)
        start = end + 1
    want = torch.tensor(golden["logits"][:rows])
    closeness = torch.nn.functional.cosine_similarity(torch.cat(got), want)
    assert closeness.min() > least


def test_sparse_step_names_the_same_layers_as_a_list_of_dense_ones(folders: dict, tmp_path) -> None:
    config = json.loads((folders["qwen3_moe_mixed"] / "config.json").read_text())
    config |= {"mlp_only_layers": [], "decoder_sparse_step": 2}
    folder = write_tiny_model(tmp_path / "m", _shape("qwen3_moe_mixed"))
    (folder / "config.json").write_text(json.dumps(config))
    assert load_model(str(folder)).config.moe.layers == (1,)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        ({"num_experts_per_tok": 9}, "top_k is 9, it must be 1 to 8"),
        ({"mlp_only_layers": [0, 1]}, "no layer has experts"),
        ({"use_sliding_window": True, "sliding_window": 0}, "sliding_window must be at least 1"),
        ({"attention_bias": True}, "q_proj.bias' is missing"),
        ({"model_type": "granite"}, "model_type 'granite' is not supported, only 'llama', 'mist"),
        ({"moe_intermediate_size": 31}, "experts.0.gate_proj.weight' of .* has shape"),
        ({"num_experts": 9}, "experts.8.gate_proj.weight' is missing"),
        ({"num_experts": 7, "num_local_experts": 7}, "expert 7 is beyond the 7 of config.json"),
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
