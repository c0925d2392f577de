"""A layer's experts in Triton beside their definition in float64, within a derived bound."""

import pytest
import torch

from kernels.interface import Gate
from kernels.triton.experts import tiles as module
from kernels.triton.experts.align import align
from kernels.triton.experts.grouped import down_product, gate_up_product
from kernels.triton.experts.layer import EXPERTS, INVARIANT_EXPERTS, coded_experts
from kernels.triton.experts.tiles import Tiles
from kernels.triton.products.codes import decode
from tests.kernels.triton.coded import random_codes

SMALL = Tiles(16, 32, 16, 4, 2)
CLAMPED = Gate(alpha=1.702, limit=1.5, up_offset=1.0)
IDS = {
    "random": torch.randint(0, 5, (7, 3), generator=torch.Generator().manual_seed(3)),
    "one expert gets all": torch.full((10, 2), 4),
    "one row": torch.tensor([[2, 0, 4]]),
    "some have none": torch.tensor([[-1, 2], [3, -1], [-1, -1]]),
}


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch):
    """Several tiles of rows, columns and depth at sizes that the interpreter can run."""
    monkeypatch.setattr(module, "_FLOAT32", SMALL)
    monkeypatch.setattr(module, "_DECODE", SMALL)
    monkeypatch.setattr(module, "INVARIANT", SMALL)
    torch.manual_seed(7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("name", "hidden", "intermediate", "gate", "biases"),
    [
        ("random", 40, 23, CLAMPED, True),
        ("one expert gets all", 32, 16, Gate(), False),
        ("one row", 7, 33, Gate("gelu_tanh"), False),
        ("some have none", 48, 20, Gate(limit=0.7), True),
    ],
)
def test_equal_to_the_definition(name, hidden, intermediate, gate, biases, dtype, make_bank):
    bank, ids = make_bank(5, hidden, intermediate, dtype, gate, biases=biases), IDS[name]
    x, weights = torch.randn(len(ids), hidden).to(dtype), torch.rand(ids.shape)
    counts = torch.zeros(5, dtype=torch.long)
    got = bank.fill(EXPERTS.allocate(bank.sizes))(x, ids, weights, counts)
    assert got.dtype == dtype
    off = (got.double() - bank.exact(x, ids, weights)).abs()
    assert (off <= bank.bound(x, ids, weights)).all()
    assert counts.tolist() == [int((ids == expert).sum()) for expert in range(5)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", ["float8", "float4", "int8", "int4"])
def test_weights_in_codes(form, dtype, make_bank):
    """The bound is that of the decoded weights: a scale adds one rounding per group."""
    bank, ids = make_bank(5, 64, 32, dtype, CLAMPED), IDS["some have none"]
    gate_up = random_codes(form, 5, 64, 64, seed=1)
    down = random_codes(form, 5, 64, 32, seed=2)
    bank.weights = [(*own, None, None) for own in zip(decode(gate_up), decode(down), strict=True)]
    x, weights = torch.randn(len(ids), 64).to(dtype), torch.rand(ids.shape)
    layer = coded_experts(bank.sizes, gate_up, down)
    assert layer.nbytes < 5 * (64 * 64 + 64 * 32) * 2
    off = (layer(x, ids, weights).double() - bank.exact(x, ids, weights)).abs()
    assert (off <= bank.bound(x, ids, weights)).all()
    with pytest.raises(ValueError, match="come as a stack"):
        layer.store(0, decode(gate_up)[0], decode(down)[0])


def test_no_rows(make_bank):
    bank = make_bank(5, 8, 8, torch.float32)
    layer = bank.fill(EXPERTS.allocate(bank.sizes))
    nothing = torch.zeros(0, 2)
    assert layer(torch.zeros(0, 8), nothing.long(), nothing).shape == (0, 8)
    assert layer.nbytes == 5 * (16 * 8 + 8 * 8) * 4


def test_a_row_gives_the_same_bits_alone_and_in_a_batch(make_bank):
    bank, ids = make_bank(5, 40, 24, torch.bfloat16), IDS["random"]
    layer = bank.fill(INVARIANT_EXPERTS.allocate(bank.sizes))
    x, weights = torch.randn(len(ids), 40).bfloat16(), torch.rand(ids.shape)
    together = layer(x, ids, weights)
    for row in (0, 5):
        own = slice(row, row + 1)
        assert torch.equal(layer(x[own], ids[own], weights[own]), together[own])


def test_nan_stays_in_its_row(make_bank):
    bank, ids = make_bank(5, 16, 16, torch.float32, CLAMPED), IDS["random"]
    layer = bank.fill(EXPERTS.allocate(bank.sizes))
    x, weights = torch.randn(len(ids), 16), torch.rand(ids.shape)
    want = layer(x, ids, weights)
    x[4, 3] = float("nan")
    got = layer(x, ids, weights)
    assert got[4].isnan().all()
    assert torch.equal(got[:4], want[:4])
    assert torch.equal(got[5:], want[5:])


def test_what_does_not_fit_is_refused(make_bank):
    bank = make_bank(5, 16, 8, torch.float32)
    layer = EXPERTS.allocate(bank.sizes)
    with pytest.raises(ValueError, match=r"down of expert 1 is \(8, 16\), it must be \(16, 8\)"):
        layer.store(1, torch.zeros(16, 16), torch.zeros(8, 16))
    with pytest.raises(ValueError, match=r"down_bias of expert 1 is \(16,\), it must be None"):
        layer.store(1, torch.zeros(16, 16), torch.zeros(16, 8), None, torch.zeros(16))
    aligned = align(IDS["one row"], 5, 16)
    weight = torch.zeros(5, 16, 8)
    with pytest.raises(ValueError, match="do not fit weights"):
        gate_up_product(torch.zeros(1, 9), weight, None, Gate(), aligned, 3, SMALL)
    with pytest.raises(ValueError, match="1 rows of 2 do not make 3"):
        gate_up_product(torch.zeros(1, 8), weight, None, Gate(), aligned, 2, SMALL)
    with pytest.raises(ValueError, match="must be contiguous"):
        down_product(torch.zeros(3, 8), weight[:, ::2], None, aligned, SMALL)
    with pytest.raises(ValueError, match="in tiles of 64 are aligned to 16"):
        down_product(torch.zeros(3, 8), weight, None, aligned, module._FEW)
