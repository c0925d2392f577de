"""Packed weights of one start serve the next: equal bits, and no other model's."""

import dataclasses
import os

import pytest
import torch

from kernels import kept_files
from kernels.compiled.machine import machine
from kernels.whole_rounds import PackedWeight
from services.engine.compute.model_runner import ModelRunner
from services.engine.compute.models import kept_weights
from services.engine.compute.models.kept_weights import KeptWeights
from services.engine.contract.config import EngineConfig
from tests.doubles.tiny_model import TinyShape, write_tiny_model


@pytest.fixture(autouse=True)
def small_is_kept(monkeypatch, tmp_path):
    monkeypatch.setattr(kept_weights, "LEAST_BYTES", 1)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def packed():
    return {
        "a": PackedWeight(torch.randn(3, 5, 16), None),
        "c": PackedWeight(torch.randn(2, 3, 16, 2).bfloat16(), None),
        "b": PackedWeight(torch.randint(0, 255, (2, 3, 16, 4), dtype=torch.uint8), torch.randn(32)),
    }


def keep(path, packed):
    kept = KeptWeights(path)
    assert not kept.complete
    for name, weight in packed.items():
        assert kept.add(name, weight) is weight
    thread = kept.save()
    if thread is not None:
        thread.join()


def test_what_was_kept_is_read_bit_for_bit(tmp_path, packed):
    path = tmp_path / "m.weights"
    keep(path, packed)
    kept = KeptWeights(path)
    assert kept.complete
    path.unlink()  # another process makes room
    for name, weight in packed.items():
        found = kept.load(name)
        assert torch.equal(found.panels, weight.panels)
        assert (found.scales is None) == (weight.scales is None)
        if weight.scales is not None:
            assert torch.equal(found.scales, weight.scales)
    assert kept.save() is None


@pytest.mark.parametrize("damage", ["cut", "empty", "noise"])
def test_a_damaged_file_is_made_anew(tmp_path, packed, damage):
    path = tmp_path / "m.weights"
    keep(path, packed)
    data = path.read_bytes()
    path.write_bytes({"cut": data[:-1], "empty": b"", "noise": os.urandom(64)}[damage])
    keep(path, packed)
    made = KeptWeights(path)
    assert made.complete
    made.save()


def test_a_file_that_ends_while_it_is_read_is_an_error(tmp_path, packed, monkeypatch):
    path = tmp_path / "m.weights"
    keep(path, packed)
    whole = path.stat()
    path.write_bytes(path.read_bytes()[:-1])
    monkeypatch.setattr(kept_weights.os, "fstat", lambda _: whole)
    kept = KeptWeights(path)
    with pytest.raises(OSError, match="cut short"):
        kept.load("a")


def test_nothing_is_kept_without_a_path_or_of_a_small_model(tmp_path, packed, monkeypatch):
    keep(None, packed)
    monkeypatch.setattr(kept_weights, "LEAST_BYTES", 1 << 20)
    keep(tmp_path / "m.weights", packed)
    assert list(tmp_path.iterdir()) == []


def test_the_files_used_longest_ago_make_room(tmp_path, packed, monkeypatch):
    for age, name in enumerate("abc"):
        keep(tmp_path / f"{name}.weights", packed)
        os.utime(tmp_path / f"{name}.weights", (1000 - age, 1000 - age))
    size = (tmp_path / "a.weights").stat().st_size
    monkeypatch.setattr(kept_weights, "MOST_BYTES", size * 5 // 2)
    keep(tmp_path / "d.weights", packed)
    assert {file.stem for file in tmp_path.iterdir()} == {"a", "d"}


def test_an_unfinished_file_of_another_process_is_left_alone(tmp_path, packed):
    part = tmp_path / "m.part"
    part.write_bytes(b"half")
    keep(tmp_path / "m.weights", packed)
    assert not (tmp_path / "m.weights").exists()
    os.utime(part, (1, 1))  # its process ended long ago
    keep(tmp_path / "m.weights", packed)
    assert (tmp_path / "m.weights").exists()
    assert not part.exists()


@pytest.fixture(params=["dense", "experts"])
def folder(request, tiny_folders, tmp_path):
    if request.param == "dense":
        return tiny_folders["tied"]
    shape = TinyShape(kind="qwen3_moe", tie_embeddings=False, dense_layers=(0,))
    return write_tiny_model(tmp_path / "experts", shape)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_second_start_reads_what_the_first_packed(folder, dtype, monkeypatch):
    config = EngineConfig(model=str(folder), threads=1, kv_memory="8MiB", dtype=dtype)
    first = ModelRunner(config)
    for thread in kept_weights.threading.enumerate():
        if thread.name == "keep-weights":
            thread.join()
    assert kept_files.folder("weights")
    free = first.profile_kv_bytes(16, 2)
    monkeypatch.setattr(KeptWeights, "add", None)
    monkeypatch.setattr(ModelRunner, "_measure_peak", None)
    second = ModelRunner(config)
    assert second.profile_kv_bytes(16, 2) == pytest.approx(free, rel=0.5)
    assert second.describe().numerics_id == first.describe().numerics_id
    for one, other in zip(first._model._layers, second._model._layers, strict=True):
        assert torch.equal(one.qkv.panels, other.qkv.panels)
        assert torch.equal(one.gate_up.panels, other.gate_up.panels)
        assert torch.equal(one.down.panels, other.down.panels)
    assert torch.equal(first._model._head.panels, second._model._head.panels)
    for runner in (first, second):
        runner.close()


def test_the_name_follows_files_kernels_processor_and_sources(tiny_folders, monkeypatch, tmp_path):
    config = ModelRunner(EngineConfig(model=str(tiny_folders["tied"]), threads=1))._config
    names = {
        kept_weights.path_of("r", config, "jit"),
        kept_weights.path_of("s", config, "jit"),
        kept_weights.path_of("r", config, "jit-int8"),
        kept_weights.path_of("r", config, "jit-bf16-kv16"),
    }
    with monkeypatch.context() as other:
        wide = dataclasses.replace(machine(), lanes=2 * machine().lanes)
        other.setattr("kernels.compiled.machine.machine", lambda: wide)
        names.add(kept_weights.path_of("r", config, "jit"))
    (tmp_path / "a.py").write_text("1")
    monkeypatch.setattr(kept_weights, "_SOURCES", (tmp_path,))
    names.add(kept_weights.path_of("r", config, "jit"))
    assert len(names) == 6
