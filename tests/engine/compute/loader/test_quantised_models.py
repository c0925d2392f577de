"""Whole models with quantised weights: tokens, ranks, what engines compare, progress."""

import json
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from services.engine.compute.loader import load_model, progress
from services.engine.compute.loader.source import NOT_DIGESTED
from services.engine.compute.model_runner import ModelRunner
from services.engine.compute.models.expert_weights import ExpertWeights
from services.engine.compute.tensor_parallel.shard import Shard
from services.engine.contract.config import EngineConfig
from services.engine.contract.model_config import ModelFileError
from tests.doubles import tiny_published
from tests.doubles.tiny_gguf import write_gguf
from tests.doubles.tiny_model import TinyShape, write_tiny_model

FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [16, 16]}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 8, "desc_act": False}


def _quantise(folder: Path, config: dict, pack: Callable[[Tensor], dict[str, Tensor]]) -> Path:
    """Replace the layers' matrices by packed ones of their shape."""
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | {"quantization_config": config}))
    tensors = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if "_proj.weight" in name:
            at = name.removesuffix(".weight")
            tensors |= {f"{at}.{part}": packed for part, packed in pack(tensor).items()}
        else:
            tensors[name] = tensor
    save_file(tensors, folder / "model.safetensors")
    return folder


def _fp8(weight: Tensor) -> dict[str, Tensor]:
    grid = tuple(-(-size // 16) for size in weight.shape)
    return {
        "weight": (weight * 64).to(torch.float8_e4m3fn),
        "weight_scale_inv": torch.full(grid, 1 / 64),
    }


def _gptq(weight: Tensor) -> dict[str, Tensor]:
    rows, columns = weight.shape
    scale = (weight.abs().max() / 7).half()
    numbers = (weight.t() / scale).round().clamp(-8, 7).int() + 8
    packed = torch.zeros(columns // 8, rows, dtype=torch.int32)
    for place in range(8):
        packed |= numbers[place::8] << 4 * place
    return {
        "qweight": packed,
        "qzeros": torch.full((columns // 8, rows // 8), 0x77777777, dtype=torch.int32),
        "scales": scale.expand(columns // 8, rows).contiguous(),
    }


def test_gpt_oss_in_mxfp4_gives_the_tokens_of_its_decoded_experts(
    drive: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiny_published, "HIDDEN", 64)  # inputs come in blocks of 32
    monkeypatch.setitem(tiny_published._norms.__kwdefaults__, "size", 64)
    decoded, folder = (
        tiny_published.write_published(tmp_path / name, tiny_published.gpt_oss())
        for name in ("decoded", "m")
    )
    raw = json.loads((folder / "config.json").read_text())
    raw |= {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": []}}
    (folder / "config.json").write_text(json.dumps(raw))
    draw = torch.Generator().manual_seed(3)
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith("_proj") and ".experts." in name]:
        experts, inputs, outputs = tensors.pop(name).shape
        grid = (experts, outputs, inputs // 32)
        packed = torch.randint(0, 256, (*grid, 16), generator=draw, dtype=torch.uint8)
        tensors[f"{name}_blocks"] = packed
        tensors[f"{name}_scales"] = torch.randint(121, 124, grid, generator=draw, dtype=torch.uint8)
    save_file(tensors, folder / "model.safetensors")
    weights = load_model(str(folder)).weights
    save_file({n: t.contiguous() for n, t in weights.items()}, decoded / "model.safetensors")
    prompts = [[(7 * i + j) % 256 for i in range(30)] for j in range(2)]
    want = drive(decoded).generate(prompts, [12] * 2)
    assert drive(folder).generate(prompts, [12] * 2) == want


def test_engines_of_other_quantisation_do_not_pass_for_equal(tmp_path: Path) -> None:
    """Version 2 of GPTQ decodes the same files to other weights."""
    ids = set()
    for number, form in enumerate(("gptq", "gptq_v2")):
        folder = write_tiny_model(tmp_path / f"m{number}")
        _quantise(folder, GPTQ | {"checkpoint_format": form}, _gptq)
        runner = ModelRunner(EngineConfig(model=str(folder), threads=1, kernels="torch"))
        ids.add((runner.describe().model_revision, runner.describe().numerics_id))
        runner.close()
    assert len({revision for revision, _ in ids}) == 1
    assert len({numerics for _, numerics in ids}) == 2


@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_biases_that_gptq_adds_must_be_zero(kernels: str, tmp_path: Path) -> None:
    """AutoGPTQ writes one for each packed weight, whether or not the architecture has it."""
    folder = _quantise(
        write_tiny_model(tmp_path / "m"),
        GPTQ,
        lambda weight: {**_gptq(weight), "bias": torch.zeros(len(weight), dtype=torch.float16)},
    )
    config = EngineConfig(model=str(folder), threads=1, kernels=kernels, num_blocks=8)
    ModelRunner(config).close()
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.bias"
    tensors[name][3] = 0.5
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelFileError, match=rf"'{name}' of .*model\.safetensors is not 0"):
        ModelRunner(config)
    tensors[name][3], tensors["model.layers.1.mlp.bias"] = 0, torch.zeros(3)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelFileError, match=r"1 tensors do not belong .*layers\.1\.mlp\.bias"):
        ModelRunner(config)


@pytest.mark.parametrize("kind", ["folder", "fp8", "gptq", "gguf"])
def test_a_tensor_rank_decodes_its_part_alone(kind: str, tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "m", TinyShape(hidden_size=64, num_heads=4, bias=True))
    path = folder
    if kind in ("fp8", "gptq"):
        config, pack = (FP8, _fp8) if kind == "fp8" else (GPTQ, _gptq)
        path = _quantise(folder, config, pack)
    elif kind == "gguf":
        path = write_gguf(folder, tmp_path / "m.gguf", "Q8_0")
    whole = load_model(str(path)).weights
    source = load_model(str(path), digest=False)
    assert source.revision == NOT_DIGESTED
    for rank in range(2):
        part = Shard(rank, 2).part_of(source).weights
        for name, tensor in whole.items():
            wanted = tensor
            if name.split(".")[-2] in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"):
                wanted = tensor.chunk(2, 0)[rank]
            elif name.endswith(("o_proj.weight", "down_proj.weight")):
                wanted = tensor.chunk(2, 1)[rank]
            assert torch.equal(part[name], wanted), name
            assert part.shape(name) == wanted.shape


@pytest.mark.parametrize("form", ["fp8", "Q8_0"])
def test_experts_stay_packed_until_they_are_read(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = TinyShape(kind="qwen3_moe", hidden_size=64, num_heads=4, num_layers=1)
    path = write_tiny_model(tmp_path / "m", shape)
    if form == "fp8":
        path = _quantise(path, FP8, _fp8)
    else:
        path = write_gguf(path, tmp_path / "m.gguf", form)
    source = load_model(str(path))
    whole = dict(source.weights)
    reads: list[str] = []
    own = type(source.weights).__getitem__

    def counted(weights: object, name: str) -> Tensor:
        reads.append(name)
        return own(weights, name)

    monkeypatch.setattr(type(source.weights), "__getitem__", counted)
    experts = ExpertWeights.find(source.config, source.weights, torch.float32, torch.device("cpu"))
    assert reads == []
    got = experts.read(0, 5)
    assert len(reads) == 3
    at = "model.layers.0.mlp.experts.5"
    assert torch.equal(got.gate_up[:32], whole[f"{at}.gate_proj.weight"])
    assert torch.equal(got.gate_up[32:], whole[f"{at}.up_proj.weight"])
    assert torch.equal(got.down, whole[f"{at}.down_proj.weight"])


def test_a_broken_scale_stops_the_start_and_names_file_and_tensor(tmp_path: Path) -> None:
    folder = _quantise(write_tiny_model(tmp_path / "m"), FP8, _fp8)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.mlp.down_proj.weight_scale_inv"][2, 1] = 0
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(
        ModelFileError,
        match=r"model m: .*model\.safetensors: tensor 'model.layers.1.mlp.down_proj"
        r".weight_scale_inv': scale \[2, 1\] is 0.0",
    ):
        ModelRunner(EngineConfig(model=str(folder), threads=1, kernels="torch"))


def test_progress_says_how_much_is_left(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = _quantise(write_tiny_model(tmp_path / "m"), FP8, _fp8)
    monkeypatch.setattr(progress, "EVERY_S", 0.0)
    source = load_model(str(folder))
    with caplog.at_level(logging.INFO, logger=progress.__name__):
        for name in source.weights:
            source.weights[name]
        lines = [record.getMessage() for record in caplog.records]
        assert len(lines) == len(source.weights)
        assert lines[0].startswith("reading m: 0 of 0 MiB, about ")
        assert lines[-1] == "reading m: 0 of 0 MiB, about 0 s left"
        source.weights["model.norm.weight"]
        assert len(caplog.records) == len(lines), "what is read again does not count"


def test_what_other_ranks_read_is_no_part_of_the_progress(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = TinyShape(kind="qwen3_moe", hidden_size=512, num_layers=1, expert_size=512)
    folder = write_tiny_model(tmp_path / "m", replace(shape, num_heads=8, num_experts=4))
    monkeypatch.setattr(progress, "EVERY_S", 0.0)
    source = load_model(str(folder))
    experts = ExpertWeights.find(source.config, source.weights, torch.float32, torch.device("cpu"))
    experts.skip_others([(0, 1), (0, 3)])
    source.weights.skip(name for name in source.weights if ".experts." not in name)
    with caplog.at_level(logging.INFO, logger=progress.__name__):
        experts.read(0, 3)
        experts.read(0, 1)
        experts.read(0, 0)
    lines = [record.getMessage().split(" MiB")[0] for record in caplog.records]
    assert lines == [f"reading m: {done} of 6" for done in range(1, 7)]


def test_progress_counts_seconds(caplog: pytest.LogCaptureFixture) -> None:
    clock = iter((0.0, 4.0, 6.0, 9.0, 20.0))
    with caplog.at_level(logging.INFO, logger=progress.__name__):
        bar = progress.LoadProgress("checksum of m", 100 << 20, now=lambda: next(clock))
        for _ in range(4):
            bar.add(25 << 20)
    assert [record.getMessage() for record in caplog.records] == [
        "checksum of m: 50 of 100 MiB, about 6 s left",
        "checksum of m: 100 of 100 MiB, about 0 s left",
    ]
