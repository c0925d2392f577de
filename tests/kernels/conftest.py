"""Kernel sets to compare with the reference set."""

import pytest
import torch

from kernels import dispatch
from kernels.interface import Kernels


@pytest.fixture
def reference() -> Kernels:
    return dispatch.load("reference")


@pytest.fixture(params=[name for name in dispatch.SETS if name.startswith("torch")])
def kernels(request: pytest.FixtureRequest) -> Kernels:
    """Each set of PyTorch operators."""
    return dispatch.load(request.param)


HALVES = (torch.bfloat16, torch.float16)
CASES = [
    ("torch", torch.float32),
    ("torch-tiled", torch.float32),
    *[("torch", dtype) for dtype in HALVES],
]


@pytest.fixture(params=CASES, ids=str)
def case(request: pytest.FixtureRequest) -> tuple[Kernels, torch.dtype]:
    """Each set with each number format that it serves."""
    name, dtype = request.param
    return dispatch.load(name), dtype


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)
