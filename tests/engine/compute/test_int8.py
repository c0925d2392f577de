"""The int8 mode on whole models: near float32, in any batch equal up to rounding, or refused."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from benchmarks.bench_quality import TEXT, Reader, compare, read
from kernels.compiled import int8, int8_short_cache
from services.common.config.settings import ConfigError
from services.engine.compute.loader import load_model
from services.engine.compute.model_runner import ModelRunner
from services.engine.compute.model_setup import choose_kernels
from services.engine.contract.config import EngineConfig
from tests.doubles.tiny_model import TinyShape, write_tiny_model
from tests.marks import needs_vnni


def _figure(model: str, windows: list[list[int]], count: int):
    source = load_model(model)
    readings = []
    for dtype in ("float32", "int8"):
        reader = Reader(dtype, 1, source, len(windows[0]) + count)
        readings.append(read(reader, windows, count))
    return compare("int8", reader.weights_bytes, readings[1], readings[0], windows)


@needs_vnni
def test_a_tiny_model_keeps_its_logits(tiny_folders: dict) -> None:
    windows = [[(7 * i + 31 * j) % 256 for i in range(64)] for j in range(4)]
    figure = _figure(str(tiny_folders["untied_llama3"]), windows, 8)
    assert figure.worst_cosine > 0.99
    assert figure.worst_cosine < 1 - 1e-7  # it did run in int8
    assert figure.perplexity_ratio == pytest.approx(
        1, abs=0.15
    )  # random weights: perplexity in the thousands


@needs_vnni
@pytest.mark.model
@pytest.mark.timeout(300)
def test_the_real_model_keeps_its_quality() -> None:
    """benchmarks/results has the whole text's figures."""
    from tokenizers import Tokenizer

    source = load_model("")
    encoder = Tokenizer.from_buffer(source.text.tokenizer_json)
    tokens = encoder.encode(TEXT.read_text("utf-8")).ids
    figure = _figure("", [tokens[:256], tokens[256:512]], 16)
    assert figure.perplexity_ratio == pytest.approx(1, abs=0.05)
    assert figure.mean_cosine > 0.99
    assert figure.forced_agreement > 0.8
    assert figure.perplexity < 60


@needs_vnni
def test_batch_and_chunks_change_little(drive: Callable, tiny_folders: dict) -> None:
    """Products see one row alone; what is left is float32's own noise, amplified by rounding."""
    run = drive(tiny_folders["tied"], dtype="int8", block_size=8)
    prompts = [[(5 * i + 17 * j) % 256 for i in range(20 + 9 * j)] for j in range(5)]
    together = run.generate(prompts, [6] * 5)
    alone = [run.generate([prompt], [6])[0] for prompt in prompts]
    chunked = run.generate(prompts, [6] * 5, chunk=7)
    same = sum(
        a == b for x, y in ((alone, together), (alone, chunked)) for a, b in zip(x, y, strict=True)
    )
    assert same >= 7


@needs_vnni
def test_weights_shrink_and_the_numerics_id_differs(tiny_folders: dict) -> None:
    infos = {
        dtype: ModelRunner(
            EngineConfig(model=str(tiny_folders["untied_llama3"]), threads=1, dtype=dtype)
        ).describe()
        for dtype in ("float32", "int8")
    }
    assert infos["int8"].weights_bytes < 0.6 * infos["float32"].weights_bytes
    assert infos["int8"].numerics_id.startswith("int8/")
    assert infos["int8"].numerics_id != infos["float32"].numerics_id
    assert infos["int8"].kv_layout == infos["float32"].kv_layout


def test_what_is_not_built_is_refused_by_name(tiny_folders: dict, tmp_path: Path) -> None:
    tied = str(tiny_folders["tied"])
    with pytest.raises(ConfigError, match=r"deterministic.*int8"):
        ModelRunner(EngineConfig(model=tied, dtype="int8", deterministic=True, kernels="torch"))
    shape = TinyShape(kind="qwen3_moe", seed=4, tie_embeddings=False)
    experts = str(write_tiny_model(tmp_path / "moe", shape))
    with pytest.raises(ConfigError, match=r"dtype=int8.*experts"):
        ModelRunner(EngineConfig(model=experts, dtype="int8", threads=1, kernels="torch"))


def test_keys_and_values_in_bfloat16_are_another_set_or_refused(
    tiny_folders: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = str(tiny_folders["tied"])
    for fields in (
        {"dtype": "float32"},
        {"dtype": "float16"},
        {"dtype": "int8", "kernels": "torch"},
    ):
        with pytest.raises(ConfigError, match=r"kv_dtype=bfloat16: .* not here with dtype="):
            ModelRunner(EngineConfig(model=folder, threads=1, kv_dtype="bfloat16", **fields))
    monkeypatch.setattr(int8, "usable", lambda sizes: True)
    monkeypatch.setattr(int8_short_cache, "usable", lambda sizes: True)
    model = load_model(folder).config
    names = {
        kv_dtype: choose_kernels(
            EngineConfig(dtype="int8", kv_dtype=kv_dtype),
            torch.device("cpu"),
            model,
            whole_model=True,
        ).name
        for kv_dtype in ("auto", "bfloat16")
    }
    assert names == {"auto": "jit-int8", "bfloat16": "jit-int8-kv16"}


def test_on_a_machine_without_int8_the_error_names_the_option(
    tiny_folders: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kernels.interface import UnsupportedError
    from kernels.torch.int8 import linear

    def refuse() -> None:
        raise UnsupportedError("dtype=int8: no VNNI")

    monkeypatch.setattr(linear, "_require_once", refuse)
    with pytest.raises(ConfigError, match="dtype=int8: no VNNI"):
        ModelRunner(
            EngineConfig(model=str(tiny_folders["tied"]), dtype="int8", threads=1, kernels="torch")
        )
