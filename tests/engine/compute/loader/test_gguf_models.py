"""GGUF files of every architecture against transformers' golden data, every stored format by a
round trip, blocks kept in memory, and what is refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from services.engine.compute.loader import load_model
from services.engine.compute.loader.gguf_weights import check_format, decode_tensor
from services.engine.compute.models.rows import ByteRows
from services.engine.contract.model_config import FactorsRope, LinearRope, ModelFileError, YarnRope
from services.engine.contract.sampling_params import SamplingParams
from services.engine.model_files.gguf_header import TensorInfo
from services.engine.offline.llm import LLM
from tests.doubles.k_quants import decode_block
from tests.doubles.tiny_gguf import write_gguf
from tests.doubles.tiny_model import TinyShape, write_tiny_model
from tests.marks import needs_vnni

DATA = Path(__file__).parents[3] / "data"
GOLDEN = {
    name: model
    for file in ("tiny_qwen3_golden.json", "tiny_variants_golden.json")
    for name, model in json.loads((DATA / file).read_text(encoding="utf-8"))["models"].items()
}
SERVED = (
    "llama_bias",
    "llama_yarn",
    "mistral",
    "mistral_window",
    "qwen2",
    "qwen2_untied",
    "qwen3",
    "qwen3_untied",
    "qwen3_moe",
)
KINDS = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")
K_KINDS = ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")


def _write(folder: Path, name: str) -> Path:
    fields = GOLDEN[name]["shape"]
    shape = TinyShape(**{**fields, "dense_layers": tuple(fields["dense_layers"])})
    return write_gguf(write_tiny_model(folder / "m", shape), folder / f"{name}.gguf")


@pytest.mark.parametrize("name", SERVED)
def test_a_file_gives_the_tokens_of_transformers(name: str, tmp_path: Path) -> None:
    items = GOLDEN[name]["items"]
    params = [
        SamplingParams(temperature=0, max_tokens=len(item["output_ids"]), ignore_eos=True)
        for item in items
    ]
    path = _write(tmp_path, name)
    fields = {"threads": 1, "num_blocks": 128, "block_size": 16, "max_num_batched_tokens": 64}
    with LLM(str(path), **fields) as llm:
        outputs = llm.generate([item["prompt_ids"] for item in items], params)
    got = [list(output.choices[0].token_ids) for output in outputs]
    assert got == [item["output_ids"] for item in items]


@pytest.mark.parametrize("name", ["qwen2_untied", "qwen3", "mistral_window", "qwen3_moe"])
def test_a_file_gives_the_config_and_tensors_of_its_folder(name: str, tmp_path: Path) -> None:
    path = _write(tmp_path, name)
    file, folder = load_model(str(path)), load_model(str(tmp_path / "m"))
    for part in ("hidden_size", "num_kv_heads", "head_dim", "qkv_bias", "moe", "sliding_window"):
        assert getattr(file.config, part) == getattr(folder.config, part), part
    assert set(file.weights) == set(folder.weights)
    for tensor in file.weights:
        assert torch.equal(file.weights[tensor], folder.weights[tensor]), tensor
    assert file.eos_token_ids == folder.eos_token_ids
    assert file.text.chat_template == folder.text.chat_template
    assert file.quantisation == "none"


@pytest.mark.parametrize("kind", KINDS)
def test_each_format_comes_back_as_the_format_rounds_it(kind: str, tmp_path: Path) -> None:
    weight = np.random.default_rng(3).normal(size=(24, 64)).astype(np.float32)
    stored = GGMLQuantizationType[kind]
    packed = gguf.quants.quantize(weight, stored)
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    writer.add_tensor("x", packed, raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    reader = gguf.GGUFReader(tmp_path / "x.gguf").tensors[0]
    info = TensorInfo((24, 64), reader.tensor_type.value, int(reader.data_offset))
    got = decode_tensor(np.fromfile(tmp_path / "x.gguf", np.uint8), "x", info)
    step = {"F": 2e-2, "B": 2e-2, "Q4": 0.5, "Q5": 0.25, "Q8": 0.04}
    limit = next(value for begin, value in step.items() if kind.startswith(begin))
    assert torch.equal(got, torch.from_numpy(gguf.quants.dequantize(packed, stored).copy()))
    assert (got - torch.from_numpy(weight)).abs().max() < limit


@pytest.mark.parametrize("kind", K_KINDS)
def test_k_formats_are_decoded_as_their_blocks_say(kind: str) -> None:
    """The package packs none of them, so the blocks are random bits with sane scales."""
    stored = GGMLQuantizationType[kind]
    block, size = GGML_QUANT_SIZES[stored]
    raw = np.random.default_rng(4).integers(0, 256, (6, size), dtype=np.uint8)
    for at in {"Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,)}.get(kind, (0, 2)):
        raw[:, at : at + 2] = np.frombuffer(np.float16(0.01).tobytes(), np.uint8)
    got = decode_tensor(raw.reshape(-1), "x", TensorInfo((3, 2 * block), stored.value, 0))
    wanted = [value for each in raw for value in decode_block(kind, each)]
    assert torch.equal(got, torch.tensor(wanted, dtype=torch.float32).view(3, 2 * block))
    assert len(got.unique()) > 40


def test_a_scale_that_is_no_number_is_named(tmp_path: Path) -> None:
    stored = GGMLQuantizationType.Q8_0
    raw = np.zeros((2, 34), np.uint8)
    raw[1, :2] = np.frombuffer(np.float16(np.nan).tobytes(), np.uint8)
    with pytest.raises(ModelFileError, match=r"tensor 'x': a scale is not a finite number"):
        decode_tensor(raw.reshape(-1), "x", TensorInfo((2, 32), stored.value, 0))


@pytest.mark.parametrize(
    ("info", "message"),
    [
        (TensorInfo((2, 256), 999, 0), "format 999 is unknown"),
        (TensorInfo((2, 48), GGMLQuantizationType.Q8_0.value, 0), "not a whole number of Q8_0"),
        (TensorInfo((2, 256), GGMLQuantizationType.Q8_K.value, 0), "Q8_K is not supported"),
    ],
)
def test_a_format_that_is_not_read_is_named(info: TensorInfo, message: str) -> None:
    with pytest.raises(ModelFileError, match=message):
        check_format("blk.0.attn_q.weight", info)


def test_an_embedding_stays_in_its_blocks_and_gives_the_same_rows(tmp_path: Path) -> None:
    shape = TinyShape(hidden_size=64, num_heads=4, seed=2)
    folder = write_tiny_model(tmp_path / "m", shape)
    path = write_gguf(folder, tmp_path / "q.gguf", "Q8_0")
    source = load_model(str(path))
    assert source.quantisation == "Q8_0"
    name = "model.embed_tokens.weight"
    whole = source.weights[name]
    ids = torch.tensor([0, 5, 5, 258, 17])
    for dtype in (torch.float32, torch.bfloat16):
        rows = source.weights.rows(name, dtype)
        assert isinstance(rows, ByteRows)
        assert rows.nbytes * 3 < whole.nbytes
        assert torch.equal(rows(ids), whole.to(dtype)[ids])
        assert rows(ids[:0]).shape == (0, 64)


@pytest.mark.parametrize("dtype", ["float32", pytest.param("int8", marks=needs_vnni), "bfloat16"])
def test_a_quantised_file_gives_the_tokens_of_its_decoded_weights(
    dtype: str, drive: Callable, tmp_path: Path
) -> None:
    shape = TinyShape(hidden_size=64, num_heads=4, seed=2)
    folder = write_tiny_model(tmp_path / "m", shape)
    path = write_gguf(folder, tmp_path / "q.gguf", "Q8_0")
    from safetensors.torch import save_file

    decoded = {name: tensor.contiguous() for name, tensor in load_model(str(path)).weights.items()}
    save_file(decoded, folder / "model.safetensors")
    prompts = [[(7 * i + j) % 256 for i in range(30)] for j in range(3)]
    want = drive(folder, dtype=dtype).generate(prompts, [12] * 3)
    assert drive(path, dtype=dtype).generate(prompts, [12] * 3) == want


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"general.architecture": "mamba"}, "architecture 'mamba' is not supported, only 'llama'"),
        ({"llama.block_count": None}, "llama: 'block_count' is missing"),
        ({"llama.embedding_length": "wide"}, "embedding_length must be a whole number"),
        ({"llama.rope.dimension_count": 4}, "rope.dimension_count 4 is not the head size 8"),
        ({"llama.rope.scaling.type": "longrope"}, "'longrope' is not supported"),
        ({"llama.expert_count": 8}, "experts are served in qwen3moe only"),
    ],
    ids=str,
)
def test_metadata_that_cannot_be_served_names_the_key(
    change: dict, message: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelFileError, match=message):
        _changed(tmp_path, change)


@pytest.mark.parametrize(
    ("change", "scaling"),
    [
        ({"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}, LinearRope(4.0)),
        ({"llama.rope.scale_linear": 2.0}, LinearRope(2.0)),
        (
            {
                "llama.rope.scaling.type": "yarn",
                "llama.rope.scaling.factor": 1.0,
                "llama.rope.scaling.original_context_length": 128,
            },
            YarnRope(1.0, 128),
        ),
        ({}, None),
    ],
    ids=str,
)
def test_scaled_frequencies_are_read(change: dict, scaling: Any, tmp_path: Path) -> None:
    assert _changed(tmp_path, change).rope_scaling == scaling


def _changed(folder: Path, change: dict[str, Any]) -> Any:
    from services.engine.model_files import gguf_config
    from services.engine.model_files.gguf_header import GgufHeader, read_header

    path = write_gguf(write_tiny_model(folder / "m"), folder / "x.gguf")
    header = read_header(path)
    metadata = {k: v for k, v in ({**header.metadata} | change).items() if v is not None}
    return gguf_config.gguf_config(GgufHeader(metadata, header.tensors), path, None)


def test_factors_of_a_file_stretch_like_the_rule_they_were_made_by(tmp_path: Path) -> None:
    """Llama 3's files carry divisors instead of the rule (rope_freqs.weight)."""
    from services.engine.compute.models.rope import cos_sin_table

    shape = TinyShape(llama3_rope=True, hidden_size=96)
    config = load_model(str(write_tiny_model(tmp_path / "m", shape))).config
    plain = cos_sin_table(_without_rope(config, None), 2)
    ruled = cos_sin_table(config, 2)
    angles = [torch.atan2(table[1, :, 1], table[1, :, 0]) for table in (plain, ruled)]
    factors = FactorsRope(tuple((angles[0] / angles[1]).tolist()))
    got = cos_sin_table(_without_rope(config, factors), 64)
    torch.testing.assert_close(got, cos_sin_table(config, 64), atol=1e-4, rtol=0)
    with pytest.raises(ModelFileError, match="2 factors, but a head has 8"):
        cos_sin_table(_without_rope(config, FactorsRope((1.0, 2.0))), 4)


def _without_rope(config: Any, scaling: Any) -> Any:
    from dataclasses import replace

    return replace(config, rope_scaling=scaling)


def test_a_file_cut_short_is_named(tmp_path: Path) -> None:
    path = write_gguf(write_tiny_model(tmp_path / "m"), tmp_path / "x.gguf")
    path.write_bytes(path.read_bytes()[:-4000])
    with pytest.raises(
        ModelFileError, match=r"x\.gguf: the file ends within tensor 'blk.1.attn_q.weight'"
    ):
        load_model(str(path))
