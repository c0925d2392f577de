"""Which files of a folder hold its weights."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from services.engine.compute.loader import load_model
from services.engine.compute.loader.safetensors_folder import weight_files
from services.engine.contract.model_config import ModelFileError
from tests.doubles.tiny_model import write_tiny_model


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
