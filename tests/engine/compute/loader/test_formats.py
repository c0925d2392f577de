"""Every quantised format against what its own tools decode (scripts/make_formats_golden.py)."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from services.engine.compute.loader.folder_weights import FolderWeights
from services.engine.compute.loader.formats import scaled, words
from services.engine.compute.loader.tensor_files import TensorFiles
from services.engine.contract.model_config import ModelFileError
from services.engine.model_files.quantisation import folder_quantisation

GOLDEN = Path(__file__).parents[3] / "data" / "formats_golden.safetensors"
AT = "model.layers.0.mlp.up_proj"
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [16, 32]}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 16}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 16, "version": "gemm"}


def _ct(form: str, **weights: object) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"num_bits": 8, "symmetric": True, **weights}}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
    }


GROUPS = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 16}
CONFIGS: Mapping[str, dict[str, Any]] = {
    "fp8_block": FP8,
    "fp8_exponents": FP8,
    "fp8_stack": FP8 | {"weight_block_size": [8, 16]},
    "fp8_tensor": {"quant_method": "fp8", "activation_scheme": "static"},
    "float4_rows": FP8,
    "mxfp4": {"quant_method": "mxfp4"},
    "ct_fp8_tensor": _ct("float-quantized", type="float", strategy="tensor"),
    "ct_fp8_channel": _ct("float-quantized", type="float", strategy="channel"),
    "ct_fp8_block": _ct(
        "float-quantized", type="float", strategy="block", block_structure=[16, 16]
    ),
    "ct_int8_channel": _ct("int-quantized", type="int", strategy="channel"),
    "ct_int8_zeros": _ct("int-quantized", **GROUPS | {"num_bits": 8, "symmetric": False}),
    "ct_pack4": _ct("pack-quantized", **GROUPS),
    "ct_pack4_zeros": _ct("pack-quantized", **GROUPS, symmetric=False),
    "ct_pack8_odd": _ct("pack-quantized", type="int", strategy="channel"),
    "ct_pack4_order": _ct("pack-quantized", **GROUPS, actorder="group"),
    "awq": AWQ,
    "gptq4_order": GPTQ | {"desc_act": True},
    "gptq8": GPTQ | {"bits": 8},
}


def _case(name: str) -> dict[str, Tensor]:
    with safe_open(GOLDEN, framework="pt") as opened:
        keys = [key for key in opened.keys() if key.startswith(f"{name}/")]  # noqa: SIM118
        return {key.removeprefix(f"{name}/"): opened.get_tensor(key) for key in keys}


def _stored(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Under the names of a checkpoint: a stack has no ".weight"."""
    if "blocks" in tensors:
        return {f"{AT}_{part}": value for part, value in tensors.items()}
    return {f"{AT}.{part}": value for part, value in tensors.items()}


def _load(folder: Path, config: object, tensors: Mapping[str, Tensor]) -> FolderWeights:
    (folder / "config.json").write_text(json.dumps({"quantization_config": config}))
    save_file(
        {name: value.contiguous() for name, value in tensors.items()}, folder / "m.safetensors"
    )
    return FolderWeights(TensorFiles([folder / "m.safetensors"]), folder_quantisation(folder))


def _load_case(folder: Path, name: str, **changes: Tensor) -> tuple[FolderWeights, str, Tensor]:
    tensors = _case(name) | changes
    expected = tensors.pop("expected")
    weights = _load(folder, CONFIGS[name], _stored(tensors))
    return weights, AT if name == "mxfp4" else f"{AT}.weight", expected


@pytest.mark.parametrize("name", CONFIGS)
def test_a_format_is_decoded_to_the_bit_as_by_its_own_tools(name: str, tmp_path: Path) -> None:
    weights, at, expected = _load_case(tmp_path, name)
    assert list(weights) == [at], "parts of a weight are no tensors of the model"
    assert weights.shape(at) == expected.shape
    got = weights[at]
    assert got.dtype == torch.float32
    assert got.shape == expected.shape
    if expected.dtype == torch.float32:
        assert torch.equal(got, expected)
    else:  # rounded once, from the same product
        assert torch.equal(got.to(expected.dtype), expected)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_part_of_a_weight_is_those_rows_of_the_whole(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from services.engine.compute.loader import folder_weights

    weights, at, _ = _load_case(tmp_path, name)
    whole = weights[at]
    for count in (2, 3):
        parts = [weights.part(at, index, count) for index in range(count)]
        assert [len(part) for part in parts] == [len(p) for p in whole.chunk(count)]
        assert torch.equal(torch.cat(parts), whole)
    monkeypatch.setattr(folder_weights, "_CHUNK", 3 * whole[0].numel())
    assert torch.equal(weights[at], whole), "decoded in chunks of 3 rows"


@pytest.mark.parametrize("name", ["fp8_stack", "mxfp4"])
def test_an_expert_decodes_its_own_scales_alone(name: str, tmp_path: Path) -> None:
    part = "scales" if name == "mxfp4" else "weight_scale_inv"
    broken = _case(name)[part].clone()
    broken[2, 1, 1] = 255 if name == "mxfp4" else float("nan")
    weights, at, expected = _load_case(tmp_path, name, **{part: broken})
    got = weights.part(at, 1, 3)
    assert torch.equal(got.to(expected.dtype), expected[1:2])
    with pytest.raises(ModelFileError, match=r"scale \[2, 1, 1\] is nan"):
        weights.part(at, 2, 3)


def test_frozen_weights_are_compressed_ones_of_older_tools(tmp_path: Path) -> None:
    config = CONFIGS["ct_pack4"] | {"quantization_status": "frozen"}
    case = _case("ct_pack4")
    expected = case.pop("expected")
    assert torch.equal(_load(tmp_path, config, _stored(case))[f"{AT}.weight"], expected)


@pytest.mark.parametrize("scale", [(), (1,), (1, 1), (8,), (8, 1), (8, 1, 1, 1), (1, 8), (1, 1, 8)])
@pytest.mark.parametrize("stack", [(), (3,)])
def test_scales_begin_with_the_expert_and_its_rows(
    stack: tuple[int, ...], scale: tuple[int, ...], tmp_path: Path
) -> None:
    """Those of a square weight's columns would fit its rows."""
    if stack:
        scale = (*stack, *scale) if scale != (1, 8) else (8, *stack)
    codes, scales = torch.randn(*stack, 8, 8).to(torch.float8_e4m3fn), torch.rand(scale) + 1
    stored = {f"{AT}.weight": codes, f"{AT}.weight_scale": scales}
    if scale in ((1, 8), (1, 1, 8), (8, 3), (3, 1, 1, 8)):
        with pytest.raises(ModelFileError, match=r"has shape .* for the whole tensor, or for its"):
            _load(tmp_path, CONFIGS["ct_fp8_channel"], stored)
        return
    got = _load(tmp_path, CONFIGS["ct_fp8_channel"], stored)[f"{AT}.weight"]
    assert torch.equal(got, codes.float() * scales.reshape(*stack, -1, 1))


@pytest.mark.parametrize("kind", [torch.int8, torch.uint8])
def test_bytes_without_a_scale_are_no_weights(kind: torch.dtype, tmp_path: Path) -> None:
    for number, config in enumerate((None, FP8)):
        folder = tmp_path / str(number)
        folder.mkdir()
        with pytest.raises(ModelFileError, match=r"'x\.weight': is [IU]8, but config.json has"):
            _load(folder, config, {"x.weight": torch.zeros(4, 4, dtype=kind)})


def test_version_2_of_gptq_stores_zero_points_as_they_are(tmp_path: Path) -> None:
    case = _case("gptq4_order")
    zeros = words.unpack(case["qzeros"], 4, 1) + 1
    assert zeros.max() == 15
    packed = torch.zeros_like(case["qzeros"])
    for place in range(8):
        packed |= zeros[:, place::8] << 4 * place
    expected = case.pop("expected")
    config = GPTQ | {"desc_act": True, "checkpoint_format": "gptq_v2"}
    weights = _load(tmp_path, config, _stored(case | {"qzeros": packed}))
    assert torch.equal(weights[f"{AT}.weight"], expected)
    one, two = (
        folder_quantisation(_folder(tmp_path / v, GPTQ | {"format": v}))
        for v in ("gptq", "gptq_v2")
    )
    assert one is not None
    assert two is not None
    assert one.label != two.label, "engines of the two must not pass for equal"


def _folder(folder: Path, config: object) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"quantization_config": config}))
    return folder


def test_a_zero_point_of_0_is_stored_as_the_largest_number(tmp_path: Path) -> None:
    case = _case("gptq4_order")
    case["qzeros"] = torch.full_like(case["qzeros"], -1)  # 15 in each place
    weights, at, _ = _load_case(tmp_path, "gptq4_order", **case)
    numbers = words.unpack(case["qweight"], 4, 0).float()
    wanted = (numbers * case["scales"].float()[case["g_idx"].long()]).t()
    assert torch.equal(weights[at], wanted)


def test_blocks_at_the_edges_may_be_smaller(tmp_path: Path) -> None:
    """DeepSeek's weights are no multiple of 128 everywhere."""
    codes = torch.randn(37, 70).to(torch.float8_e4m3fn)
    scales = torch.rand(3, 3) + 0.1
    weights = _load(tmp_path, FP8, {"x.weight": codes, "x.weight_scale_inv": scales})
    rows, columns = torch.arange(37) // 16, torch.arange(70) // 32
    wanted = codes.float() * scales[rows][:, columns]
    assert torch.equal(weights["x.weight"], wanted)
    assert torch.equal(weights.part("x.weight", 1, 5), wanted[8:16])


def test_tables_may_have_the_blocks_of_microscaling_beside_other_weights(tmp_path: Path) -> None:
    codes = torch.randn(4, 64).to(torch.float8_e4m3fn)
    scales = torch.randint(120, 130, (4, 2), dtype=torch.uint8).view(torch.float8_e8m0fnu)
    weights = _load(tmp_path, FP8, {"embed.weight": codes, "embed.scale": scales})
    wanted = codes.float() * scales.float()[:, torch.arange(64) // 32]
    assert torch.equal(weights["embed.weight"], wanted)


def test_every_4_bit_float_and_scale() -> None:
    every = torch.arange(256, dtype=torch.uint8)
    low, high = scaled.decode_float4(every).view(256, 2).unbind(1)

    def one(code: int) -> float:
        """Sign, two bits of exponent with bias 1, one bit of fraction."""
        sign, exponent, fraction = -1 if code & 8 else 1, code >> 1 & 3, code & 1
        return sign * (
            fraction / 2 if exponent == 0 else 2.0 ** (exponent - 1) * (1 + fraction / 2)
        )

    assert low.tolist() == [one(code & 15) for code in range(256)]
    assert high.tolist() == [one(code >> 4) for code in range(256)]


def test_names_of_modelopt_and_scales_of_activations(tmp_path: Path) -> None:
    case = _case("fp8_tensor")
    expected = case.pop("expected")
    tensors = _stored(case | {"input_scale": torch.ones(())})
    tensors["model.layers.0.self_attn.k_proj.k_scale"] = torch.ones(())
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "hf_quant_config.json").write_text(
        json.dumps({"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}})
    )
    save_file(tensors, tmp_path / "m.safetensors")
    weights = FolderWeights(
        TensorFiles([tmp_path / "m.safetensors"]), folder_quantisation(tmp_path)
    )
    assert list(weights) == [f"{AT}.weight"]
    assert torch.equal(weights[f"{AT}.weight"], expected)


def test_groups_of_compressed_tensors_are_chosen_by_name_first(tmp_path: Path) -> None:
    four, eight = _case("ct_pack4"), _case("ct_pack8_odd")
    config = _ct("pack-quantized", **GROUPS)
    config["config_groups"]["group_1"] = {
        "targets": [r"re:.*down_proj$"],
        "weights": {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True},
    }
    tensors = {f"a.up_proj.{part}": four[part] for part in four if part != "expected"}
    tensors |= {f"a.down_proj.{part}": eight[part] for part in eight if part != "expected"}
    weights = _load(tmp_path, config, tensors)
    assert torch.equal(weights["a.up_proj.weight"], four["expected"])
    assert torch.equal(weights["a.down_proj.weight"], eight["expected"])


WRONG = {
    "fp8_block": ("weight_scale_inv", "needs scales for blocks of 16 x 32"),
    "ct_fp8_channel": ("weight_scale", "needs scales for the whole tensor"),
    "ct_pack4_zeros": ("weight_zero_point", r"has shape \(1, 4\), expected \(4, 4\)"),
    "ct_pack4_order": ("weight_g_idx", r"has shape \(1,\), expected \(64,\)"),
    "awq": ("qzeros", r"has shape \(1, 4\), expected \(4, 4\)"),
    "gptq8": ("qzeros", r"has shape \(1, 8\), expected \(4, 8\)"),
    "mxfp4": ("scales", r"has shape \(1, 8, 2\), expected \(3, 8, 2\)"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_part_of_a_wrong_shape_is_named_with_its_file(name: str, tmp_path: Path) -> None:
    part, message = WRONG[name]
    with pytest.raises(ModelFileError, match=rf"m\.safetensors: tensor '.*{part}'.*{message}"):
        _load_case(tmp_path, name, **{part: _case(name)[part][: 2 if "channel" in name else 1]})


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("fp8_block", "weight_scale_inv"),
        ("ct_int8_channel", "weight_scale"),
        ("ct_pack4", "weight_shape"),
        ("ct_pack4", "weight_scale"),
        ("awq", "scales"),
        ("gptq8", "qzeros"),
        ("gptq4_order", "g_idx"),
        ("ct_pack4_order", "weight_g_idx"),
        ("mxfp4", "scales"),
    ],
)
def test_a_missing_part_is_named(name: str, part: str, tmp_path: Path) -> None:
    tensors = _case(name)
    del tensors["expected"], tensors[part]
    stored = _stored(tensors)
    with pytest.raises(
        ModelFileError, match=rf"{part}.* is missing|scale is missing|{part}'.*missing"
    ):
        _load(tmp_path, CONFIGS[name], stored)


@pytest.mark.parametrize("value", [0.0, float("nan"), float("inf")])
@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("fp8_block", "weight_scale_inv"),
        ("ct_pack4", "weight_scale"),
        ("awq", "scales"),
        ("gptq8", "scales"),
    ],
)
def test_a_scale_of_0_or_no_number_is_named(
    name: str, part: str, value: float, tmp_path: Path
) -> None:
    broken = _case(name)[part].clone()
    broken[1, 1] = value
    weights, at, _ = _load_case(tmp_path, name, **{part: broken})
    with pytest.raises(
        ModelFileError, match=rf"m\.safetensors: tensor '.*{part}': scale \[1, 1\] is {value}"
    ):
        weights[at]


@pytest.mark.parametrize("name", ["fp8_exponents", "float4_rows", "mxfp4"])
def test_an_exponent_of_255_is_no_number(name: str, tmp_path: Path) -> None:
    part = "scales" if name == "mxfp4" else "scale"
    broken = _case(name)[part].clone()
    broken.view(torch.uint8)[-1] = 255
    weights, at, _ = _load_case(tmp_path, name, **{part: broken})
    with pytest.raises(ModelFileError, match=r"is nan, it must be finite"):
        weights[at]


def test_a_float8_that_is_no_number_is_named(tmp_path: Path) -> None:
    broken = _case("fp8_block")["weight"].clone()
    broken.view(torch.uint8)[20, 5] = 0x7F
    weights, at, _ = _load_case(tmp_path, "fp8_block", weight=broken)
    with pytest.raises(ModelFileError, match=r"weight': number \[20, 5\] is NaN"):
        weights.part(at, 1, 2)


@pytest.mark.parametrize(
    ("name", "part"), [("gptq4_order", "g_idx"), ("ct_pack4_order", "weight_g_idx")]
)
def test_a_group_that_does_not_exist_is_named(name: str, part: str, tmp_path: Path) -> None:
    broken = _case(name)[part].clone()
    broken[9] = 4
    weights, at, _ = _load_case(tmp_path, name, **{part: broken})
    with pytest.raises(ModelFileError, match=rf"{part}': input 9 is of group 4, but there are 4"):
        weights[at]


def test_float8_without_a_quantization_config_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        ModelFileError, match=r"is F8_E4M3, but config.json has no quantization_config"
    ):
        _load(tmp_path, None, {"x.weight": torch.zeros(4, 4).to(torch.float8_e4m3fn)})


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("fp8", "must be an object, got 'fp8'"),
        (
            {"quant_method": "bitsandbytes"},
            "quant_method 'bitsandbytes' is not supported, only 'fp8'",
        ),
        (
            {"quant_method": "modelopt", "quant_algo": "NVFP4"},
            "quant_algo 'NVFP4' is not supported",
        ),
        (FP8 | {"fmt": "e5m2"}, "fmt 'e5m2' is not supported, only 'e4m3'"),
        (FP8 | {"weight_block_size": [128, 0]}, "weight_block_size must be two numbers above 0"),
        (GPTQ | {"bits": 3}, "bits 3 is not supported, only 4 and 8"),
        (GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format 'marlin' is not supported"),
        (GPTQ | {"group_size": 0}, "group_size must be -1 or above 0, got 0"),
        (AWQ | {"version": "gemv"}, "version 'gemv' is not supported, only 'gemm'"),
        (AWQ | {"bits": 8}, "bits 8 is not supported, only 4"),
        (_ct("nvfp4-pack-quantized"), "format 'nvfp4-pack-quantized' is not supported, only"),
        (_ct("pack-quantized", num_bits=3), "num_bits 3 of type 'int' is not supported with"),
        (_ct("float-quantized", type="int"), "num_bits 8 of type 'int' is not supported with"),
        (_ct("int-quantized", strategy="tensor_group"), "strategy 'tensor_group' with"),
        (_ct("pack-quantized") | {"quantization_status": "calibration"}, "'calibration' is"),
        (_ct("pack-quantized") | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse-24"),
        (_ct("pack-quantized") | {"transform_config": {"R1": {}}}, "transform_config is not"),
        (_ct("pack-quantized") | {"config_groups": {}}, "config_groups is missing or empty"),
    ],
    ids=str,
)
def test_what_is_not_served_is_refused_by_key(config: object, message: str, tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=rf"config\.json.*{message}"):
        folder_quantisation(_folder(tmp_path / "m", config))
