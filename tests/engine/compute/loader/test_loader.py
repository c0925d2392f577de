"""Finding and reading model files: what is refused, and what the parts become."""

import json
import struct
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from services.engine.compute.loader import load_model
from services.engine.compute.loader.gguf_weights import decode_tensor
from services.engine.compute.model_runner import ModelRunner
from services.engine.contract.config import EngineConfig
from services.engine.contract.model_config import ModelFileError
from services.engine.model_files import load_text_assets
from services.engine.model_files.gguf_header import read_header
from services.engine.model_files.known_models import find_model
from tests.doubles.tiny_model import write_tiny_model


def _edit_config(folder: Path, **values: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def test_a_folder_gives_config_tokenizer_and_every_eos(tmp_path: Path) -> None:
    source = load_model(str(write_tiny_model(tmp_path / "Tiny-Model")))
    assert source.name == "tiny-model"
    assert source.eos_token_ids == (257, 258)
    assert source.config.num_kv_heads == 2
    assert source.config.tie_embeddings
    tokenizer = Tokenizer.from_str(source.text.tokenizer_json.decode())
    ids = tokenizer.encode("žluť<eot>", add_special_tokens=False).ids
    assert ids[-1] == 258
    assert tokenizer.decode(ids, skip_special_tokens=False) == "žluť<eot>"
    assert source.text.special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}


def test_the_revision_follows_the_weights_alone(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "m")
    before = load_model(str(folder)).revision
    _edit_config(folder, comment="nothing")
    assert load_model(str(folder)).revision == before
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"][0] += 1
    save_file(weights, folder / "model.safetensors")
    assert load_model(str(folder)).revision != before


def test_text_assets_need_no_torch(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "m")
    code = (
        "import sys; from services.engine.model_files import load_text_assets;"
        f"a = load_text_assets({str(folder)!r}); assert a.tokenizer_json;"
        "assert 'torch' not in sys.modules, 'torch was imported'"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "mamba"}, "mamba"),
        ({"attention_bias": True}, "q_proj.bias' is missing"),
        ({"mlp_bias": True}, "gate_proj.bias' is missing"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "'dynamic' is not supported"),
        ({"rope_scaling": {"type": "longrope"}}, "'longrope' is not supported"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "rope_scaling: 'factor' is missing"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0.5}}, "factor must be at least 1"),
        ({"rope_scaling": "linear"}, "rope_scaling must be an object"),
        ({"rope_theta": 1}, "rope_theta must be above 1"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({"hidden_act": "gelu"}, "hidden_act must be 'silu', got 'gelu'"),
        (
            {"hidden_size": "48"},
            r"config.json: hidden_size must be a whole number of 0 or more, got '48'",
        ),
        ({"num_hidden_layers": None}, "'num_hidden_layers' is missing"),
        ({"num_attention_heads": 0}, "not a multiple of num_attention_heads 0"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps must be a number"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings must be true or false"),
        ({"quantization_config": {"quant_method": "aqlm"}}, "quant_method 'aqlm' is not supported"),
        ({"num_key_value_heads": 4}, "must be a multiple of num_kv_heads"),
        ({"vocab_size": 300}, "shape"),
        ({"num_hidden_layers": 1}, "do not belong to this architecture"),
        ({"num_hidden_layers": 3}, "missing"),
    ],
)
def test_a_folder_that_cannot_be_served_is_refused(
    tmp_path: Path, change: dict, message: str
) -> None:
    folder = write_tiny_model(tmp_path / "m")
    _edit_config(folder, **change)
    with pytest.raises(ModelFileError, match=message):
        ModelRunner(EngineConfig(model=str(folder)))


def test_broken_files_are_refused(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "m")
    (folder / "model.safetensors").write_bytes(b"\xff" * 64)
    with pytest.raises(ModelFileError, match=r"model\.safetensors"):
        load_model(str(folder))
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelFileError, match=r"no \*\.safetensors"):
        load_model(str(folder))
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ModelFileError, match=r"tokenizer\.json"):
        load_text_assets(str(folder))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"not a model", "not a GGUF"),
        (b"GGUF" + struct.pack("<I", 9), "version 9"),
        (b"GGUF" + struct.pack("<IQQ", 3, 1, 2), "broken"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 10**9), "broken"),
    ],
)
def test_a_broken_gguf_is_refused(tmp_path: Path, data: bytes, message: str) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(data)
    with pytest.raises(ModelFileError, match=message):
        load_model(str(path))


def test_an_unknown_model_names_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="smollm2-135m-instruct"):
        find_model(str(tmp_path / "nowhere"))
    with pytest.raises(ModelFileError, match=r"config\.json"):
        find_model(str(tmp_path))


def test_the_models_folder_of_the_environment_comes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "SmolLM2-135M-Instruct.Q4_1.gguf"
    file.touch()
    monkeypatch.setenv("INFERFLEET_MODELS", str(tmp_path))
    assert find_model("").path == file
    assert find_model("SmolLM2-135M-Instruct").path == file


def test_quantised_tensors_are_close_to_what_was_stored(tmp_path: Path) -> None:
    weight = torch.randn(64, 96).numpy()
    writer = gguf.GGUFWriter(tmp_path / "q.gguf", "llama")
    kinds = ("Q4_1", "Q8_0", "F16", "F32")
    for name in kinds:
        kind = gguf.GGMLQuantizationType[name]
        packed = gguf.quants.quantize(weight, kind)
        writer.add_tensor(name, packed, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    data = np.fromfile(tmp_path / "q.gguf", np.uint8)
    header = read_header(tmp_path / "q.gguf")
    for name, limit in zip(kinds, (0.3, 0.03, 0.003, 0), strict=True):
        restored = decode_tensor(data, name, header.tensors[name])
        assert restored.shape == (64, 96)
        assert (restored - torch.from_numpy(weight)).abs().max() <= limit
