"""Whole models in each format of quantised weights: equal logits, and bad tensors by name."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from services.engine.compute.loader import ModelSource, load_model
from services.engine.compute.model_runner import ModelRunner
from services.engine.contract.config import EngineConfig
from services.engine.contract.model_config import ModelFileError
from services.engine.contract.runner import SequenceMetadata
from tests.doubles.packed_weights import PACKINGS, write_packed
from tests.doubles.tiny_gguf import write_gguf
from tests.doubles.tiny_model import write_tiny_model
from tests.doubles.tiny_v4 import write_tiny_v4

MODULE = "model.layers.1.mlp.experts.3.down_proj"
"""One of the last that are read."""


def _logits(source: ModelSource, dtype: str) -> Tensor:
    config = EngineConfig(dtype=dtype, kernels="torch", threads=1, block_size=16)
    runner = ModelRunner(config, source)
    runner.allocate(3)
    meta = SequenceMetadata(0, 0, tuple(range(30, 60)), None, (2, 1), sample=True)
    logits: Tensor = runner.execute_main_model(0, [meta], None).logits
    runner.close()
    return logits


@pytest.mark.parametrize(
    ("name", "dtype"), [*((name, "float32") for name in PACKINGS), ("fp8_blocks", "bfloat16")]
)
def test_a_packed_model_gives_the_logits_of_its_decoded_weights(
    name: str, dtype: str, tmp_path: Path
) -> None:
    folder, decoded = write_packed(tmp_path / "m", PACKINGS[name])
    source = load_model(str(folder))
    got, want = (_logits(model, dtype) for model in (source, replace(source, weights=decoded)))
    assert torch.isfinite(want).all()
    assert torch.equal(got, want)


def _refused(folder: Path, tensors: dict[str, Tensor]) -> str:
    """The message with which the start ends."""
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelFileError) as caught:
        ModelRunner(EngineConfig(model=str(folder), threads=1, kernels="torch"))
    return str(caught.value)


@pytest.mark.parametrize("name", PACKINGS)
def test_a_bad_part_is_named_with_its_file(name: str, tmp_path: Path) -> None:
    folder, _ = write_packed(tmp_path / "m", PACKINGS[name])
    tensors = load_file(folder / "model.safetensors")
    parts = [tensor for tensor in tensors if tensor.startswith(f"{MODULE}.")]
    assert len(parts) >= 2
    for part in parts:
        without = {tensor: value for tensor, value in tensors.items() if tensor != part}
        message = _refused(folder, without)
        assert MODULE in message, "missing"
        assert " missing" in message
        message = _refused(folder, tensors | {part: tensors[part][:-1]})
        assert MODULE in message, "a row too few"
        assert "model.safetensors" in message
        assert "has shape" in message or "has 63 rows" in message
    scale = f"{MODULE}.{PACKINGS[name].scale}"
    broken = {"nan": float("nan")} if name == "float4" else {"0.0": 0.0, "nan": float("nan")}
    for text, value in broken.items():
        own = tensors[scale].clone()
        if name == "float4":
            own.view(torch.uint8)[-1, -1] = 255
        else:
            own[-1, -1] = value
        message = _refused(folder, tensors | {scale: own})
        assert f"model.safetensors: tensor '{scale}': scale " in message
        assert f" is {text}, it must be finite and not 0" in message


@pytest.mark.parametrize("form", ["float32", "gguf"])
def test_a_bad_plain_tensor_is_named(form: str, tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "m")
    tensors = load_file(folder / "model.safetensors")
    for name in ("model.norm.weight", "model.layers.1.mlp.down_proj.weight"):
        changes = {"missing": None, "has shape": tensors[name][:-1]}
        for problem, value in changes.items():
            own = {tensor: kept for tensor, kept in tensors.items() if tensor != name}
            if value is not None:
                own[name] = value.contiguous()
            if form == "float32":
                message = _refused(folder, own)
            else:
                save_file(own, folder / "model.safetensors")
                path = write_gguf(folder, tmp_path / "m.gguf")
                with pytest.raises(ModelFileError) as caught:
                    ModelRunner(EngineConfig(model=str(path), threads=1, kernels="torch"))
                message = str(caught.value)
            assert f"'{name}'" in message
            assert problem in message
            assert value is None or ("m.gguf" if form == "gguf" else "model.safetensors") in message


def test_an_expert_beyond_the_count_in_a_table_is_named(tmp_path: Path) -> None:
    folder = write_tiny_v4(tmp_path / "m")
    tensors = load_file(folder / "model.safetensors")
    name = "layers.0.ffn.gate.tid2eid"
    for expert in (8, -1):
        own = tensors[name].clone()
        own[41, 1] = expert
        message = _refused(folder, tensors | {name: own})
        assert f"tensor '{name}' of " in message
        assert "model.safetensors: the experts of token 41 are [" in message
        assert f"{expert}], they must be 0 to 7" in message
