"""The tool that writes tiny models: published layout, equal bytes, and what it refuses."""

import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from services.engine.compute.loader import load_model
from tests.doubles.tiny_gguf import check_packing
from tests.doubles.tiny_model import KINDS, TinyShape, write_tiny_model

SCRIPT = Path(__file__).parents[3] / "scripts" / "make_tiny_model.py"


def test_the_script_writes_what_the_function_writes(tmp_path: Path) -> None:
    flags = ["--kind", "qwen3_moe", "--num-experts", "4", "--seed", "3"]
    command = [sys.executable, str(SCRIPT), str(tmp_path / "a"), *flags]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert "model.safetensors" in printed
    write_tiny_model(tmp_path / "b", TinyShape(kind="qwen3_moe", num_experts=4, seed=3))
    for path in (tmp_path / "b").iterdir():
        assert (tmp_path / "a" / path.name).read_bytes() == path.read_bytes()


def test_a_format_that_cannot_hold_the_shape_is_refused_before_writing(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), str(tmp_path / "a"), "--gguf", "Q8_0"]
    ended = subprocess.run(command, check=False, capture_output=True, text=True)
    assert ended.returncode == 2
    assert "hidden_size must be a multiple of 32 for Q8_0, got 48" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize(
    ("shape", "kind", "message"),
    [
        (TinyShape(hidden_size=96, intermediate_size=80), "Q8_0", "^intermediate_size must"),
        (TinyShape("qwen3_moe", hidden_size=96, expert_size=24), "Q4_0", "^expert_size must"),
        (TinyShape(), "Q9", "'Q9' is no format"),
        (TinyShape(), "F64", "'F64' cannot be packed"),
    ],
    ids=str,
)
def test_packing_is_checked_by_size_and_format(shape: TinyShape, kind: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_packing(shape, kind)


@pytest.mark.parametrize("kind", KINDS)
def test_tensors_have_their_published_names(kind: str, tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "m", TinyShape(kind=kind))
    weights = load_file(folder / "model.safetensors")
    at = "model.layers.1"
    assert (f"{at}.self_attn.q_norm.weight" in weights) == kind.startswith("qwen3")
    sparse = kind == "qwen3_moe"
    assert (f"{at}.mlp.gate_proj.weight" in weights) != sparse
    for part in ("gate_proj", "up_proj", "down_proj"):
        assert (f"{at}.mlp.experts.7.{part}.weight" in weights) == sparse
    assert (f"{at}.mlp.gate.weight" in weights) == sparse
    source = load_model(str(folder))
    assert source.config.architecture == kind
    assert "<eot>" in source.text.chat_template


@pytest.mark.parametrize(
    "shape",
    [
        TinyShape(kind="bert"),
        TinyShape(hidden_size=50),
        TinyShape(num_kv_heads=4),
        TinyShape(top_k=9),
    ],
    ids=str,
)
def test_sizes_that_do_not_fit_write_nothing(shape: TinyShape, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"kind|hidden_size|top_k"):
        write_tiny_model(tmp_path / "m", shape)
    assert not (tmp_path / "m").exists()
