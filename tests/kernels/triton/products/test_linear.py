"""Dense products in Triton: every format beside its decoded weight, and rows by themselves."""

import pytest
import torch

from kernels.triton.experts.tiles import Tiles
from kernels.triton.products import linear as module
from kernels.triton.products.codes import CodedWeight, decode, float8_weight
from kernels.triton.products.linear import TritonLinear, pack_invariant
from services.engine.compute.loader.formats.scaled import decode_float4
from tests.kernels.triton.coded import random_codes

SMALL = Tiles(16, 32, 32, 4, 2)
UNIT = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch):
    torch.manual_seed(7)
    monkeypatch.setattr(module, "_FLOAT32", SMALL)
    monkeypatch.setattr(module, "INVARIANT", SMALL)


def check(linear, weight, x) -> None:
    """|error| <= n * 2^-23 * sum of |products| + rounding of the result, by definition."""
    exact = x.double() @ weight.double().T
    size = x.double().abs() @ weight.double().abs().T
    limit = size * (x.shape[1] + 4) * 2.0**-23 + UNIT[x.dtype] * exact.abs() + 1e-30
    got = linear(x)
    assert got.dtype == x.dtype
    assert ((got.double() - exact).abs() <= limit).all()
    residual = torch.randn(got.shape).to(x.dtype)
    want = residual + got
    linear.add_to(residual, x)
    assert torch.equal(residual, want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("rows", "inputs", "outputs"), [(1, 40, 33), (19, 64, 7), (0, 8, 8)])
def test_plain_weights(rows, inputs, outputs, dtype):
    weight = torch.randn(outputs, inputs).to(dtype)
    x = torch.randn(rows, 2 * inputs).to(dtype)[:, :inputs]
    check(pack_invariant(weight), weight, x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", ["float8", "float4", "int8", "int4"])
def test_weights_in_codes(form, dtype):
    weight = random_codes(form, 35, 96)
    check(TritonLinear(weight), decode(weight), torch.randn(3, 96).to(dtype))


def test_one_scale_for_a_row_and_a_depth_that_no_tile_divides():
    zeros = torch.full((5, 1), 128, dtype=torch.uint8)
    codes = torch.randint(0, 256, (5, 50), dtype=torch.uint8)
    weight = CodedWeight(format="int8", codes=codes, scales=torch.rand(5, 1), zeros=zeros, group=50)
    check(TritonLinear(weight), decode(weight), torch.randn(2, 50))


def test_codes_decode_as_the_loader_decodes_them():
    codes = torch.arange(256, dtype=torch.uint8).view(4, 64)
    scales = torch.tensor([0, 1, 127, 252], dtype=torch.uint8).view(4, 1).repeat(1, 4)
    weight = CodedWeight(format="float4", codes=codes, scales=scales, group=32)
    want = decode_float4(codes) * scales[:, :1].view(torch.float8_e8m0fnu).float()
    assert torch.equal(decode(weight), want)
    # Products with unit vectors show every decoded number.
    shown = TritonLinear(weight)(torch.eye(128))
    assert torch.equal(shown.T, want)
    numbers = torch.arange(256, dtype=torch.uint8).view(2, 128)
    numbers[numbers & 0x7F == 0x7F] = 0
    weight = float8_weight(numbers.view(torch.float8_e4m3fn), torch.ones(1, 1), (2, 128))
    assert torch.equal(TritonLinear(weight)(torch.eye(128)).T, decode(weight))


@pytest.mark.parametrize("form", ["plain", "float8"])
def test_a_row_gives_the_same_bits_in_every_batch(form):
    weight = torch.randn(40, 96).bfloat16() if form == "plain" else random_codes("float8", 40, 96)
    linear, x = TritonLinear(weight), torch.randn(37, 96).bfloat16()
    together = linear(x)
    assert torch.equal(linear(x[20:21]), together[20:21])
    assert torch.equal(linear(x[5:30]), together[5:30])


def test_nan_stays_in_its_row():
    linear, x = TritonLinear(random_codes("int4", 8, 64)), torch.randn(4, 64)
    want = linear(x)
    x[1, 60] = float("nan")
    got = linear(x)
    assert got[1].isnan().all()
    assert torch.equal(got[[0, 2, 3]], want[[0, 2, 3]])


def test_what_does_not_fit_is_refused():
    codes, scales = torch.zeros(4, 64, dtype=torch.uint8), torch.ones(4, 2)
    with pytest.raises(ValueError, match=r"scales are \(4, 2\), they must be \(4, 4\)"):
        CodedWeight(format="float8", codes=codes, scales=scales, group=16)
    with pytest.raises(ValueError, match="group is 24, it must be a power of two"):
        CodedWeight(format="float8", codes=codes, scales=scales, group=24)
    with pytest.raises(ValueError, match="int8 has a zero point per group"):
        CodedWeight(format="int8", codes=codes, scales=scales, group=32)
    with pytest.raises(ValueError, match=r"scales are torch\.float32"):
        CodedWeight(format="float4", codes=codes, scales=torch.ones(4, 4), group=32)
    linear = TritonLinear(torch.zeros(4, 8))
    with pytest.raises(ValueError, match="do not fit weights"):
        linear(torch.zeros(2, 9))
    with pytest.raises(ValueError, match=r"weights are torch\.float32"):
        linear(torch.zeros(2, 8, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="residual must be contiguous"):
        linear.add_to(torch.zeros(2, 5), torch.zeros(2, 8))
    with pytest.raises(ValueError, match=r"weight .* must be contiguous"):
        TritonLinear(torch.zeros(8, 8).T[:, :4])
