"""Which files of a folder hold its weights."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from services.engine.compute.loader import load_model
from services.engine.compute.loader.safetensors_folder import weight_files
from services.engine.compute.loader.tensor_files import TensorFiles
from services.engine.compute.model_runner import ModelRunner
from services.engine.contract.config import EngineConfig
from services.engine.contract.model_config import ModelFileError
from tests.doubles.tiny_model import TinyShape, write_tiny_model
from tests.doubles.tiny_v4 import write_tiny_v4


def _shard(folder: Path) -> dict[str, torch.Tensor]:
    """Three files and their index, beside a copy under other names that must not be read."""
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(weights)
    where = {}
    for part in range(3):
        file = f"model-0000{part + 1}-of-00003.safetensors"
        save_file({name: weights[name] for name in names[part::3]}, folder / file)
        where |= dict.fromkeys(names[part::3], file)
    save_file({"tok_embeddings.weight": torch.zeros(2, 2)}, folder / "consolidated.safetensors")
    index = {"metadata": {}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return weights


def test_shards_are_read_as_one_and_other_copies_are_not(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "m")
    weights = _shard(folder)
    assert len(weight_files(folder)) == 3
    found = load_model(str(folder)).weights
    assert set(found) == set(weights)
    assert all(torch.equal(found[name], weights[name]) for name in weights)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "m")
    _shard(folder)
    (folder / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(ModelFileError, match=r"model-00002-of-00003.safetensors: missing, but"):
        load_model(str(folder))


def test_an_index_without_a_map_is_named(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "m")
    (folder / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(ModelFileError, match="weight_map is missing"):
        load_model(str(folder))


def test_other_formats_are_refused_with_advice(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "m")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ModelFileError, match=r"pytorch_model.bin is not read: save the model as"):
        load_model(str(folder))


def test_shards_without_an_index_are_read_as_one(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "m")
    weights = _shard(folder)
    (folder / "model.safetensors.index.json").unlink()
    assert set(load_model(str(folder)).weights) == set(weights)
    (folder / "model-00003-of-00003.safetensors").unlink()
    with pytest.raises(
        ModelFileError, match=r"model-00003-of-00003.safetensors: missing, one of 3"
    ):
        load_model(str(folder))


def test_a_tensor_that_is_not_where_the_index_says_is_named(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "m")
    _shard(folder)
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    for name in ("model.norm.weight", "model.layers.9.mlp.up_proj.weight"):
        file = next(f for f in index["weight_map"].values() if f != index["weight_map"].get(name))
        path.write_text(json.dumps({"weight_map": index["weight_map"] | {name: file}}))
        with pytest.raises(ModelFileError, match=rf"index.json: tensor '{name}' is not in {file}"):
            load_model(str(folder))


def test_a_tensor_in_two_files_is_named(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "m")
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").rename(folder / "a.safetensors")
    save_file({"model.norm.weight": weights["model.norm.weight"]}, folder / "b.safetensors")
    with pytest.raises(
        ModelFileError, match=r"b\.safetensors: tensor 'model.norm.weight' is also in a"
    ):
        load_model(str(folder))


def test_a_file_cut_short_names_the_tensor_that_is_cut(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "m")
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(
        ModelFileError,
        match=r"model\.safetensors: the file ends 100 bytes before the end of tensor",
    ):
        load_model(str(folder))


@pytest.mark.parametrize(
    ("head", "message"),
    [
        (b"[]", "not a JSON object"),
        (b'{"x": 1}', "tensor 'x': its entry is not an object"),
        (b'{"x": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}', "tensor 'x': shape or"),
        (
            b'{"x": {"dtype": "F32", "shape": [1], "data_offsets": [4, 0]}}',
            "data_offsets are wrong",
        ),
    ],
)
def test_a_broken_head_is_named(head: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(len(head).to_bytes(8, "little") + head + bytes(8))
    with pytest.raises(ModelFileError, match=rf"x\.safetensors: .*{message}"):
        TensorFiles([path])


@pytest.mark.parametrize("tied", [True, False])
def test_rows_beyond_the_vocabulary_are_left_out(tied: bool, tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "m", TinyShape(tie_embeddings=tied))
    weights = load_file(folder / "model.safetensors")
    plain = dict(weights)
    tables = [name for name in weights if "embed" in name or "head" in name]
    for name in tables:
        weights[name] = torch.cat((weights[name], torch.full((61, 48), float("nan"))))
    save_file(weights, folder / "model.safetensors")
    found = load_model(str(folder)).weights
    assert len(tables) == (1 if tied else 2)
    assert all(torch.equal(found[name], plain[name]) for name in tables)
    assert all(found.shape(name) == plain[name].shape for name in tables), "as it is checked"


def test_tables_of_deepseek_v4_may_be_padded_too(tmp_path: Path) -> None:
    folder = write_tiny_v4(tmp_path / "m")
    weights = load_file(folder / "model.safetensors")
    plain = dict(weights)
    tables = [name for name in weights if name.endswith(("embed.weight", "head.weight", "tid2eid"))]
    for name in tables:
        more = torch.full((32, weights[name].shape[1]), 99).to(weights[name].dtype)
        weights[name] = torch.cat((weights[name], more))
    save_file(weights, folder / "model.safetensors")
    assert len(tables) == 3
    ModelRunner(EngineConfig(model=str(folder), threads=1)).close()
    found = load_model(str(folder)).weights
    assert all(torch.equal(found[name], plain[name]) for name in tables)


def test_a_tensor_of_a_wrong_shape_is_named_with_its_file(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "m")
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"] = torch.ones(47)
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(
        ModelFileError,
        match=r"'model.norm.weight' of .*m/model\.safetensors has shape \(47,\), but",
    ):
        ModelRunner(EngineConfig(model=str(folder), threads=1, kernels="torch"))


def test_an_extra_tensor_is_named_with_its_file(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "m")
    weights = load_file(folder / "model.safetensors") | {"model.extra.weight": torch.ones(2)}
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(
        ModelFileError, match=r"1 tensors do not .*'model.extra.weight' of .*m/model"
    ):
        ModelRunner(EngineConfig(model=str(folder), threads=1, kernels="torch"))


def test_an_expert_beyond_the_count_is_named(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "m", TinyShape(kind="qwen3_moe", num_experts=4))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_experts": 3}))
    with pytest.raises(
        ModelFileError, match=r"tensor '.*experts\.3\..*': expert 3 is beyond the 3 of config"
    ):
        load_model(str(folder))


def test_a_head_beside_a_tied_embedding_is_not_read_and_an_untied_one_must_exist(
    tmp_path: Path,
) -> None:
    folder = write_tiny_model(tmp_path / "m")
    weights = load_file(folder / "model.safetensors")
    save_file(weights | {"lm_head.weight": torch.ones(3, 3)}, folder / "model.safetensors")
    ModelRunner(EngineConfig(model=str(folder), threads=1, kernels="torch")).close()
    save_file(weights, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    with pytest.raises(ModelFileError, match=r"tensor 'lm_head.weight' is missing"):
        ModelRunner(EngineConfig(model=str(folder), threads=1, kernels="torch"))
