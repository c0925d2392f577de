"""The sets that are held against the plain oracles."""

import pytest
import torch

from kernels import dispatch
from kernels.dispatch import Kernels


@pytest.fixture
def reference() -> Kernels:
    return dispatch.load("reference")


@pytest.fixture(params=[name for name in dispatch.SETS if name.startswith("torch")])
def kernels(request: pytest.FixtureRequest) -> Kernels:
    """Each set of torch operators."""
    return dispatch.load(request.param)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)
