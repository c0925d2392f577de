"""Expert kernels and products against their definitions on a real device: `make gpu`."""

import pytest
import torch

from kernels import dispatch
from kernels.expert_products import ExpertSizes
from kernels.interface import Gate, Routing
from kernels.triton.products.codes import decode
from kernels.triton.products.linear import TritonLinear
from tests.kernels.triton.coded import random_codes

pytestmark = pytest.mark.gpu
LIMIT = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 1e-2}


@pytest.fixture(scope="module")
def sets():
    assert torch.cuda.is_available(), "no CUDA device: make gpu needs one"
    torch.manual_seed(0)
    return dispatch.load("triton"), dispatch.load("reference")


@pytest.mark.parametrize("dtype", LIMIT)
@pytest.mark.parametrize("rows", [1, 40, 700])
def test_experts(sets, rows, dtype):
    triton, reference = sets
    sizes = ExpertSizes(
        experts=16, hidden=320, intermediate=96, gate=Gate(), biases=False, dtype=dtype,
        device=torch.device("cuda"),
    )  # fmt: skip
    packed, plain = triton.experts.allocate(sizes), reference.experts.allocate(sizes)
    for expert in range(16):
        gate_up = torch.randn(192, 320, device="cuda").to(dtype) / 16
        down = torch.randn(320, 96, device="cuda").to(dtype) / 8
        packed.store(expert, gate_up, down)
        plain.store(expert, gate_up, down)
    scores = torch.randn(rows, 16, device="cuda")
    weights, ids = triton.route(scores, Routing(4), None, None)
    x = torch.randn(rows, 320, device="cuda").to(dtype)
    got = packed(x, ids, weights)
    want = plain(x.double(), ids, weights.double())
    torch.testing.assert_close(got.double(), want, rtol=LIMIT[dtype], atol=LIMIT[dtype])


@pytest.mark.parametrize("form", ["float8", "float4", "int8", "int4"])
@pytest.mark.parametrize("rows", [1, 70])
def test_products_with_weights_in_codes(sets, rows, form):
    made = random_codes(form, 200, 512)
    weight = type(made)(
        format=made.format,
        codes=made.codes.cuda(),
        scales=made.scales.cuda(),
        zeros=None if made.zeros is None else made.zeros.cuda(),
        group=made.group,
    )
    x = torch.randn(rows, 512, device="cuda").bfloat16()
    exact = x.double() @ decode(weight).double().T
    size = x.double().abs() @ decode(weight).double().abs().T
    off = (TritonLinear(weight)(x).double() - exact).abs()
    assert (off <= size * 516 * 2.0**-23 + exact.abs() * 2.0**-8).all()


def test_a_row_gives_the_same_bits_in_every_batch(sets):
    weight = torch.randn(512, 1024, device="cuda").bfloat16()
    linear, x = TritonLinear(weight), torch.randn(300, 1024, device="cuda").bfloat16()
    together = linear(x)
    for first, last in ((0, 1), (17, 18), (100, 260)):
        assert torch.equal(linear(x[first:last]), together[first:last])
