"""DeepSeek-V3 and V3.2 against transformers (see scripts/make_golden.py): however a prompt is cut,
whatever is beside it, and wherever its cache was moved."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from services.common.config.settings import ConfigError
from services.engine.compute.loader import load_model
from services.engine.compute.model_runner import ModelRunner
from services.engine.compute.tensor_parallel.shard import Shard
from services.engine.contract.config import EngineConfig
from services.engine.contract.expert_placement import first_placement
from services.engine.contract.model_config import ModelFileError
from services.engine.contract.runner import ExpertPlacement, SequenceMetadata
from services.engine.contract.sampling_params import SamplingParams
from services.engine.offline.llm import LLM
from services.engine.scheduling.scheduler import Scheduler
from tests.doubles.packed_weights import PACKINGS
from tests.doubles.tiny_deepseek import DeepseekShape, write_tiny_deepseek

DATA = Path(__file__).parents[3] / "data"
GOLDEN = json.loads((DATA / "tiny_deepseek_golden.json").read_text(encoding="utf-8"))["models"]
BLOCK = 16


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("deepseek")
    return {
        name: write_tiny_deepseek(root / name, DeepseekShape(**golden["shape"]))
        for name, golden in GOLDEN.items()
    }


def _forward(run, parts: list[tuple[int, list[int]]], table: tuple[int, ...]) -> list[torch.Tensor]:
    """Logits after each part of one sequence; a part is its first position and its tokens."""
    return [
        run.runner.execute_main_model(
            step, [SequenceMetadata(0, start, tuple(tokens), None, table, sample=True)], None
        ).logits[0]
        for step, (start, tokens) in enumerate(parts)
    ]


def _chunks(prompt: list[int], size: int) -> list[tuple[int, list[int]]]:
    return [(start, prompt[start : start + size]) for start in range(0, len(prompt), size)]


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("name", GOLDEN)
def test_logits_equal_those_of_transformers(
    name: str, deterministic: bool, drive: Callable, folders: dict
) -> None:
    golden, prompt = GOLDEN[name], GOLDEN[name]["prompt_ids"]
    run = drive(folders[name], block_size=BLOCK, deterministic=deterministic, num_blocks=40)
    want = {
        p: torch.tensor(row) for p, row in zip(golden["positions"], golden["logits"], strict=True)
    }
    compared, last = set(), []
    decoded = [(0, prompt[:120]), *_chunks(prompt, 1)[120:]]
    for parts in ([(0, prompt)], _chunks(prompt, 64), decoded):
        table = run.table(len(prompt))
        got = _forward(run, parts, table)
        for (start, tokens), logits in zip(parts, got, strict=True):
            end = start + len(tokens) - 1
            if end in want:
                torch.testing.assert_close(logits, want[end], atol=1e-4, rtol=0)
                compared.add(end)
        last.append(got[-1])
        run.free.extend(table)
    assert compared >= {63, 127, 128, 149}
    if deterministic:
        assert all(torch.equal(logits, last[0]) for logits in last)


@pytest.mark.parametrize("name", ["v3", "v32"])
def test_a_prompt_may_be_cut_at_every_position(name: str, drive: Callable, folders: dict) -> None:
    """V3 to the bit in `deterministic`; V3.2, which attends to 20 of 40 positions, closely."""
    item = GOLDEN[name]["items"][2]
    prompt = item["prompt_ids"]
    run = drive(folders[name], block_size=7, deterministic=name == "v3", num_blocks=40)
    table = run.table(len(prompt))
    whole = _forward(run, [(0, prompt)], table)[0]
    assert int(whole.argmax()) == item["output_ids"][0]
    for cut in range(1, len(prompt)):
        got = _forward(run, [(0, prompt[:cut]), (cut, prompt[cut:])], table)[-1]
        if name == "v3":
            assert torch.equal(got, whole), cut
        torch.testing.assert_close(got, whole, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", GOLDEN)
def test_greedy_tokens_alone_batched_in_chunks_on_a_warm_prefix_and_preempted(
    name: str, folders: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    preempted = []
    preempt = Scheduler._preempt
    monkeypatch.setattr(
        Scheduler, "_preempt", lambda *args: (preempted.append(args[1]), preempt(*args))
    )
    items = GOLDEN[name]["items"]
    prompts = [item["prompt_ids"] for item in items]
    want = [item["output_ids"] for item in items]
    params = [
        SamplingParams(temperature=0, max_tokens=len(tokens), ignore_eos=True) for tokens in want
    ]
    fields = {"threads": 1, "block_size": BLOCK, "max_num_batched_tokens": 48}
    with LLM(str(folders[name]), num_blocks=64, **fields) as llm:
        batched = llm.generate(prompts, params)
        assert [list(o.choices[0].token_ids) for o in batched] == want
        (alone,) = llm.generate([prompts[-1]], [params[-1]])
        assert list(alone.choices[0].token_ids) == want[-1]
        assert alone.num_cached_tokens >= 128
    assert not preempted
    # Each of six begins in one block and ends in two.
    with LLM(str(folders[name]), num_blocks=10, **fields) as llm:
        crowded = llm.generate(prompts[1:2] * 6, params[1:2] * 6)
        assert [list(o.choices[0].token_ids) for o in crowded] == want[1:2] * 6
        assert preempted


def test_copied_and_scrubbed_blocks_hold_every_tensor_of_the_cache(
    drive: Callable, folders: dict
) -> None:
    prompt = GOLDEN["v32"]["prompt_ids"][:64]
    run = drive(folders["v32"], block_size=BLOCK, deterministic=True, num_blocks=40)
    first, second = run.table(65), run.table(65)
    _forward(run, [(0, prompt)], first)
    want = _forward(run, [(64, [5])], first)[0]
    run.runner.copy_blocks(list(zip(first, second, strict=True)))
    with torch.inference_mode():
        for cache in run.runner._caches:
            cache[list(first)] = float("nan")
    assert torch.equal(_forward(run, [(64, [5])], second)[0], want)
    with torch.inference_mode():
        run.runner.scrub()
    assert all(bool(cache.isfinite().all()) for cache in run.runner._caches)
    assert len({cache.shape[-1] for cache in run.runner._caches}) == 2
    info = run.runner.describe()
    assert info.kv_layout == "paged/3xindex16/float32+3xlatent24/float32"
    assert info.kv_bytes_per_block == 3 * BLOCK * (16 + 24) * 4


def test_a_placement_of_experts_changes_nothing(drive: Callable, folders: dict) -> None:
    """Layer 0 is dense: the first layer of the map is the model's second."""
    prompt = GOLDEN["v3"]["prompt_ids"][:40]
    run = drive(folders["v3"], deterministic=True, redundant_experts=4, num_blocks=40)
    table, runner = run.table(40), run.runner
    want = _forward(run, [(0, prompt)], table)[0]
    shape = runner.describe().experts
    assert (shape.num_layers, shape.num_experts, shape.num_slots) == (2, 8, 12)
    old = first_placement(shape, runner.describe().model_revision)
    moved = ExpertPlacement(1, tuple(row[5:] + row[:5] for row in old.phy2log), old.model_revision)
    while not runner.prepare_placement(moved):
        pass
    runner.apply_placement(1)
    assert torch.equal(_forward(run, [(0, prompt)], table)[0], want)
    loads = torch.tensor(runner.expert_loads())
    assert loads.sum(1).tolist() == [2 * 40 * 3] * 2  # rounds, rows, experts of a row


@pytest.mark.parametrize("name", ["v3", "v32"])
def test_bfloat16_comes_close(name: str, drive: Callable, folders: dict) -> None:
    """Early rows only: a router may choose another expert where two are nearly equal."""
    golden = GOLDEN[name]
    run = drive(folders[name], dtype="bfloat16", block_size=BLOCK, num_blocks=40)
    parts = [(0, golden["prompt_ids"][:1]), (1, golden["prompt_ids"][1:2])]
    got = torch.stack(_forward(run, parts, run.table(2)))
    closeness = torch.nn.functional.cosine_similarity(got, torch.tensor(golden["logits"][:2]))
    assert closeness.min() > 0.999
    assert {cache.dtype for cache in run.runner._caches} == {torch.bfloat16}


def _edit(folder: Path, edit: dict) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | edit))


def test_published_fp8_weights_are_those_that_their_scales_give(
    drive: Callable, tmp_path: Path
) -> None:
    """Several blocks in every matrix; routers, norms, embedding and head are not quantised."""
    shape = DeepseekShape(num_layers=2, draft_layers=1)
    plain = write_tiny_deepseek(tmp_path / "plain", shape)
    stored = write_tiny_deepseek(tmp_path / "fp8", shape)
    weights, decoded = load_file(plain / "model.safetensors"), {}
    packing, draw = PACKINGS["fp8_blocks"], torch.Generator().manual_seed(4)
    for name, weight in list(weights.items()):
        decoded[name] = weight
        if weight.dim() == 2 and not name.endswith(("gate.weight", "tokens.weight", "head.weight")):
            del weights[name]
            parts, decoded[name] = packing.pack((weight.shape[0], weight.shape[1]), draw)
            at = name.removesuffix(".weight")
            weights |= {f"{at}.{part}": value for part, value in parts.items()}
    save_file(weights, stored / "model.safetensors")
    save_file(decoded, plain / "model.safetensors")
    _edit(stored, {"quantization_config": packing.config})
    prompt = GOLDEN["v3"]["prompt_ids"][:9]
    first, second = (drive(folder, num_blocks=8) for folder in (plain, stored))
    want = _forward(first, [(0, prompt)], first.table(9))[0]
    assert torch.equal(_forward(second, [(0, prompt)], second.table(9))[0], want)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("small")
    return {
        kind: write_tiny_deepseek(root / kind, DeepseekShape(kind=kind, num_layers=2))
        for kind in ("deepseek_v3", "deepseek_v32")
    }


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        ({"scoring_func": "softmax"}, "scoring_func 'softmax' is not supported, only 'sigmoid'"),
        ({"topk_method": "greedy"}, "topk_method 'greedy' is not supported, only 'noaux_tc'"),
        ({"rope_interleave": False}, "rope_interleave False is not supported, only True"),
        ({"attention_bias": True}, "attention_bias True is not supported, only False"),
        ({"moe_layer_freq": 2}, "moe_layer_freq 2 is not supported, only 1"),
        ({"kv_lora_rank": None}, "'kv_lora_rank' is missing"),
        ({"v_head_dim": 0}, "v_head_dim is 0, it must be at least 1"),
        ({"qk_rope_head_dim": 7}, "head_dim is 7, it must be even"),
        ({"n_group": 3}, "groups is 3: 8 experts do not make as many groups of 2"),
        ({"n_group": 8}, "groups is 8: 8 experts do not make as many groups of 2"),
        ({"topk_group": 5}, "top_groups is 5, it must be 1 to 4"),
        ({"num_experts_per_tok": 5}, "top_groups is 2, it must .* and hold top_k .5. experts"),
        ({"mlp_layer_types": ["dense"]}, "mlp_layer_types must list 2 times 'dense' or 'sparse'"),
        ({"first_k_dense_replace": None}, "'first_k_dense_replace' is missing"),
        ({"routed_scaling_factor": None}, "'routed_scaling_factor' is missing"),
        ({"index_topk": None, "model_type": "deepseek_v32"}, "'index_topk' is missing"),
        ({"index_head_dim": 4, "model_type": "deepseek_v32"}, "index_head_dim is 4, it must be at"),
        ({"q_lora_rank": None, "model_type": "deepseek_v32"}, "q_lora_rank is missing: the index"),
        ({"kv_lora_rank": 18}, "kv_a_proj_with_mqa.weight' of .* has shape"),
        ({"n_shared_experts": 0}, "do not belong to this architecture: .*shared_experts"),
        ({"q_lora_rank": None}, "q_proj.weight' is missing"),
    ],
    ids=str,
)
def test_files_that_cannot_be_served(tmp_path: Path, small: dict, edit: dict, message: str) -> None:
    source = small[edit.get("model_type", "deepseek_v3")]
    for path in source.iterdir():
        (tmp_path / path.name).symlink_to(path)
    text = json.loads((source / "config.json").read_text()) | edit
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps(text))
    with pytest.raises(ModelFileError, match=message):
        ModelRunner(EngineConfig(model=str(tmp_path)))


@pytest.mark.parametrize("name", ["mlp.gate.e_score_correction_bias", "self_attn.kv_b_proj.weight"])
def test_a_missing_tensor_is_named(tmp_path: Path, small: dict, name: str) -> None:
    folder = write_tiny_deepseek(tmp_path / "m", DeepseekShape(num_layers=2))
    weights = load_file(folder / "model.safetensors")
    del weights[f"model.layers.1.{name}"]
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(ModelFileError, match=f"'model.layers.1.{name}' is missing"):
        ModelRunner(EngineConfig(model=str(folder)))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tensor_parallel": 2}, r"tensor_parallel=2: not supported for deepseek_v3"),
        ({"dtype": "int8"}, "dtype=int8: not supported for"),
    ],
    ids=str,
)
def test_options_that_do_not_fit_are_refused(small: dict, fields: dict, message: str) -> None:
    config = EngineConfig(model=str(small["deepseek_v3"]), **fields)
    with pytest.raises(ConfigError, match=message):
        ModelRunner(config, partition=Shard(0, 2) if "tensor_parallel" in fields else None)


def test_listed_layers_are_the_same_as_the_first_dense_ones(tmp_path: Path) -> None:
    folder = write_tiny_deepseek(tmp_path / "m", DeepseekShape(first_dense=2))
    _edit(folder, {"mlp_layer_types": ["dense", "dense", "sparse"], "first_k_dense_replace": None})
    config = load_model(str(folder)).config
    assert config.moe is not None
    assert config.moe.layers == (2,)
    assert config.mla is not None
    # (8 + 8)^(-1/2), and the square of 0.1 * 0.7 * ln(4) + 1.
    assert config.mla.scale == pytest.approx(0.25 * 1.0970406**2)
