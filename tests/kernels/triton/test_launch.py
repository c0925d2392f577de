"""The watched way of launching kernels: what it refuses, and that nothing passes by."""

from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from kernels.triton.launch import GRID_LIMITS, LaunchError, describe, recorded
from kernels.triton.rms_norm import rms_norm
from kernels.triton.sample import sample


def _kernel(x, weight, out, size, TILE): ...


KERNEL = SimpleNamespace(fn=_kernel)
X = torch.zeros(3, 4)
TILE = {"TILE": 8}


def test_fake_tensors_are_reported_and_nothing_runs():
    seen = []
    with recorded(seen.append), FakeTensorMode():
        x = torch.empty(5, 8, device="cuda", dtype=torch.bfloat16)
        out = rms_norm(x, torch.empty(8, device="cuda", dtype=torch.bfloat16), 1e-6)
    (made,) = seen
    assert (made.kernel, made.grid) == ("rms_norm_kernel", (5,))
    assert [name for name, _ in made.tensors] == ["x", "weight", "out"]
    assert made.tensors[2][1].shape == out.shape == (5, 8)


def test_real_tensors_are_reported_and_run():
    x, seen = torch.randn(3, 8), []
    with recorded(seen.append):
        out = rms_norm(x, torch.ones(8), 0.0)
    torch.testing.assert_close(out.pow(2).mean(1), torch.ones(3))
    assert len(seen) == 1
    rms_norm(x, torch.ones(8), 0.0)
    assert len(seen) == 1


def test_a_tensor_of_the_host_among_those_of_a_device_is_refused():
    with recorded(lambda made: None), FakeTensorMode():
        scores = torch.empty(2, 2000, device="cuda")
        with pytest.raises(LaunchError, match=r"sample_tile_kernel: .*keys on cpu"):
            sample(scores, torch.empty(2, 2, dtype=torch.int32))


@pytest.mark.parametrize("grid", [(0,), (1, GRID_LIMITS[1] + 1), (1, 1, 1, 1), ()])
def test_a_grid_that_no_device_runs_is_refused(grid):
    with pytest.raises(LaunchError, match="_kernel: grid"):
        describe(KERNEL, grid, (X, X, X, 4), TILE)


def test_a_grid_may_be_computed_and_arguments_named():
    made = describe(
        KERNEL, lambda given: (given["size"],), (X,), {"weight": X, "out": X, "size": 4} | TILE
    )
    assert made.grid == (4,)
    assert [name for name, _ in made.tensors] == ["x", "weight", "out"]


def test_a_missing_argument_is_named():
    with pytest.raises(LaunchError, match="no value for size"):
        describe(KERNEL, (1,), (X, X, X), TILE)
