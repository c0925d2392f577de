"""The models of `tiny_published` against transformers, and what of their files is refused."""

import json
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from services.common.config.settings import ConfigError
from services.engine.compute.loader import load_model
from services.engine.compute.model_runner import ModelRunner
from services.engine.compute.models.architecture import PLAIN, Architecture, Experts
from services.engine.compute.models.architectures import ARCHITECTURES
from services.engine.compute.models.expert_weights import is_expert_name, stored_names
from services.engine.compute.models.registry import runs_whole_rounds
from services.engine.compute.tensor_parallel.shard import Shard
from services.engine.contract.config import EngineConfig
from services.engine.contract.model_config import ModelFileError
from services.engine.contract.runner import SequenceMetadata
from services.engine.model_files.hf_config import ARCHITECTURES as READ
from tests.doubles.tiny_published import PUBLISHED, write_published
from tests.parity.cases import CASES, Case
from tests.parity.measure import LOGIT_PATHS, TOKEN_PATHS, measure

OWN = [case for case in CASES if case.name in PUBLISHED]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("published")
    return {case.name: case.write(root / case.name) for case in OWN}


@pytest.mark.parametrize("case", OWN, ids=lambda case: case.name)
def test_equals_transformers_by_every_path(case: Case, folders: dict[str, Path]) -> None:
    whole = case.name in ARCHITECTURES  # of variants the logits are enough
    rows = {row.path: row for row in measure(case, folders[case.name], tokens=whole)}
    assert set(rows) == {*LOGIT_PATHS, *(TOKEN_PATHS if whole else ())}
    for row in rows.values():
        assert row.tokens_equal, row
        assert (row.error or 0) <= 1e-4, row
    lengths = [len(item["output_ids"]) for item in case.golden["items"]]
    assert max(lengths) > 5


@pytest.mark.parametrize("name", ["gpt_oss", "glm4_moe", "gemma3"])
def test_a_row_is_bit_identical_in_any_company_and_chunk(
    name: str, folders: dict[str, Path], drive: Callable
) -> None:
    """In `deterministic`: alone, beside others, whole and in chunks of 7."""
    run = drive(folders[name], block_size=16, deterministic=True)
    prompt = [(3 * index) % 256 for index in range(60)]

    def logits(chunk: int, others: int) -> torch.Tensor:
        tables = [run.table(64) for _ in range(1 + others)]
        for start in range(0, 60, chunk):
            batch = [
                SequenceMetadata(
                    seq,
                    start,
                    tuple((t + seq) % 256 for t in prompt[start : start + chunk]),
                    None,
                    table,
                    sample=True,
                )
                for seq, table in enumerate(tables)
            ]
            got = run.runner.execute_main_model(start, batch, None).logits
        return got[0]

    want = logits(60, 0)
    for chunk, others in ((60, 2), (7, 0), (7, 3)):
        assert torch.equal(logits(chunk, others), want)


@pytest.mark.parametrize("name", ["phi3", "gemma3"])
def test_half_formats_come_close(name: str, folders: dict[str, Path], drive: Callable) -> None:
    golden = next(case.golden for case in OWN if case.name == name)
    run = drive(folders[name], dtype="bfloat16", block_size=16)
    prompt = tuple(golden["prompt_ids"])
    meta = SequenceMetadata(0, 0, prompt, None, run.table(len(prompt)), sample=True)
    got = run.runner.execute_main_model(0, [meta], None).logits[0]
    want = torch.tensor(golden["logits"][-1])
    assert torch.nn.functional.cosine_similarity(got, want, dim=0) > 0.995


def test_gemmas_norms_are_added_to_1_in_float32(drive: Callable, tmp_path: Path) -> None:
    """In bfloat16, 1 + 2 ** -10 is 1."""
    found = []
    for name, value in (("zero", 0.0), ("small", 2**-10)):
        folder = write_published(tmp_path / name, PUBLISHED["gemma3"]())
        weights = load_file(folder / "model.safetensors")
        norms = {key: torch.full_like(weights[key], value) for key in weights if "norm" in key}
        save_file(weights | norms, folder / "model.safetensors")
        run = drive(folder, dtype="bfloat16", block_size=16)
        meta = SequenceMetadata(0, 0, tuple(range(20)), None, run.table(20), sample=True)
        found.append(run.runner.execute_main_model(0, [meta], None).logits)
    assert not torch.equal(*found)


def test_stacked_experts_on_two_ranks_give_the_logits_of_one(
    folders: dict[str, Path], drive: Callable
) -> None:
    golden = next(case.golden for case in OWN if case.name == "gpt_oss")
    prompt = tuple(golden["prompt_ids"])
    run = drive(folders["gpt_oss"], expert_parallel=2)
    try:
        meta = SequenceMetadata(0, 0, prompt, None, run.table(len(prompt)), sample=True)
        got = run.runner.execute_main_model(0, [meta], None).logits[0]
    finally:
        run.runner.close()
    torch.testing.assert_close(got, torch.tensor(golden["logits"][-1]), atol=1e-4, rtol=0)


def test_ranks_with_experts_map_the_tensors_of_experts_alone(folders: dict[str, Path]) -> None:
    for name in ("mixtral", "gpt_oss", "glm4_moe"):
        source = load_model(str(folders[name]))
        made_of = ARCHITECTURES[source.config.architecture].experts
        moe = source.config.moe
        assert made_of is not None
        assert moe is not None
        stored = {
            tensor
            for layer in moe.layers
            for tensor in stored_names(made_of.experts, layer, moe.num_experts)
        }
        assert {tensor for tensor in source.weights if is_expert_name(tensor)} == stored


def test_readers_and_declarations_name_the_same_architectures() -> None:
    assert set(READ.values()) == set(ARCHITECTURES)


def test_whole_rounds_are_for_plain_layers(folders: dict[str, Path]) -> None:
    for name, folder in folders.items():
        assert not runs_whole_rounds(load_model(str(folder)).config), name


def test_the_help_of_kernels_names_the_compiled_architectures() -> None:
    compiled = {
        name
        for name, made_of in ARCHITECTURES.items()
        if made_of in (PLAIN, Architecture(experts=Experts()))
    }
    (option,) = (field for field in fields(EngineConfig) if field.name == "kernels")
    named = {word.strip(",;") for word in str(option.metadata).split()}
    assert named & set(ARCHITECTURES) == compiled


def test_number_formats_that_are_not_served_are_named(folders: dict[str, Path]) -> None:
    for name, dtype, message in (
        ("gemma3", "float16", "dtype=float16: .* gemma3 .*; use bfloat16 or float32"),
        ("mixtral", "int8", "dtype=int8: .* experts is served for qwen3_moe only, .* mixtral"),
    ):
        with pytest.raises(ConfigError, match=message):
            ModelRunner(EngineConfig(model=str(folders[name]), dtype=dtype))


def test_tensor_parallelism_names_what_it_serves(folders: dict[str, Path]) -> None:
    for name, message in (
        ("phi3", "phi3 is served on one rank only; more than one serve llama, mistral"),
        ("gemma3", "gemma3 is served on one rank only"),
        ("mixtral", "a model with experts is split by expert_parallel"),
    ):
        with pytest.raises(ConfigError, match=message):
            Shard(0, 2).part_of(load_model(str(folders[name])))


def test_longrope_serves_the_original_length(folders: dict[str, Path]) -> None:
    """Beyond it other factors would apply from the first position on."""
    assert load_model(str(folders["phi3_longrope"])).config.max_position == 256
    with pytest.raises(ConfigError, match="the model supports at most 256 positions"):
        ModelRunner(EngineConfig(model=str(folders["phi3_longrope"]), max_model_len=257))


def test_the_layer_of_glm_that_drafts_is_kept(tmp_path: Path) -> None:
    model, at = PUBLISHED["glm4_moe"](), "model.layers.3"
    own = {name: shape for name, shape in model.shapes.items() if "layers.2." in name}
    shapes = model.shapes | {name.replace("layers.2", "layers.3"): own[name] for name in own}
    shapes |= {f"{at}.{name}.weight": (48,) for name in ("enorm", "hnorm", "shared_head.norm")}
    shapes[f"{at}.eh_proj.weight"] = (48, 96)
    drafts = type(model)(model.config, shapes, model.seed)
    runner = ModelRunner(EngineConfig(model=str(write_published(tmp_path / "a", drafts))))
    assert len(runner._model.mtp) == 1
    extra = type(model)(model.config, model.shapes | {"model.layers.2.eh_proj.weight": (4, 4)})
    with pytest.raises(ModelFileError, match=r"model.layers.2.eh_proj.weight"):
        ModelRunner(EngineConfig(model=str(write_published(tmp_path / "b", extra))))


@pytest.mark.parametrize(
    ("name", "edit", "message"),
    [
        ("gemma3", {"final_logit_softcapping": 30.0}, "final_logit_softcapping 30.0 is not supp"),
        ("gemma3", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping 50.0 is not supp"),
        ("gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention True"),
        ("gemma3", {"hidden_activation": "silu"}, "hidden_activation must be 'gelu_pytorch_tanh'"),
        ("gemma3", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar must be above 0"),
        ("gemma3", {"sliding_window_pattern": -1}, "sliding_window_pattern must be a whole number"),
        (
            "gemma3",
            {"rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2.0}}},
            "sliding_attention: rope_type 'linear' is not supported",
        ),
        ("gpt_oss", {"swiglu_limit": 5.0}, "swiglu_limit 5.0 is not supported, only 7.0"),
        ("gpt_oss", {"layer_types": ["sliding_attention"]}, "layer_types must be 3 times"),
        ("gpt_oss", {"layer_types": ["chunked"] * 3}, "got 3 entries, among them 'chunked'"),
        ("gpt_oss", {"num_local_experts": 5}, r"experts.gate_up_proj' of .* has shape"),
        ("gpt_oss", {"intermediate_size": 30}, r"mlp.experts.gate_up_proj' of .* has shape"),
        ("glm4_moe", {"scoring_func": "softmax"}, "scoring_func 'softmax' is not supported, only"),
        ("glm4_moe", {"topk_method": "greedy"}, "topk_method 'greedy' is not supported, only"),
        ("glm4_moe", {"n_group": 3}, "groups is 3: 16 experts do not make as many groups"),
        ("glm4_moe", {"topk_group": 5}, "top_groups is 5, it must be 1 to 4"),
        ("glm4_moe", {"partial_rotary_factor": 1.5}, "must be above 0 and at most 1, got 1.5"),
        ("glm4_moe", {"partial_rotary_factor": 0.2}, "rotary_dim is 3, it must be even"),
        ("mixtral", {"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 is not supported"),
        ("mixtral", {"num_local_experts": 5}, "experts.4.w1.weight' is missing"),
        ("phi3", {"rope_scaling": {"type": "longrope"}}, "short_factor must be 6 numbers above 0"),
        ("phi3", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type 'dynamic'"),
    ],
    ids=str,
)
def test_files_that_cannot_be_served(
    name: str, edit: dict, message: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    folder = tmp_path / "m"
    folder.mkdir()
    for path in folders[name].iterdir():
        (folder / path.name).symlink_to(path)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").unlink()
    (folder / "config.json").write_text(json.dumps(config | edit), encoding="utf-8")
    with pytest.raises(ModelFileError, match=message):
        ModelRunner(EngineConfig(model=str(folder)))
