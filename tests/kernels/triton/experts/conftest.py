"""Random experts, the bound of their error, and memory that shows what was never written."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from kernels import reference
from kernels.expert_products import ExpertSizes, LayerExperts
from kernels.interface import Gate

Weights = tuple[Tensor, Tensor, Tensor | None, Tensor | None]
UNIT = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
"""Largest relative error of rounding to a format."""
STEEPEST = 1.13
"""Largest slope of SiLU (1.10, whatever its alpha) and of GELU (1.13)."""


@pytest.fixture(autouse=True)
def _poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fresh memory holds NaN and numbers that no index may have."""
    real = torch.empty

    def poisoned(*args, **kwargs) -> Tensor:
        made = real(*args, **kwargs)
        return made.fill_(float("nan") if made.is_floating_point() else -(2**31) + 7)

    monkeypatch.setattr(torch, "empty", poisoned)


@dataclass
class Bank:
    """Weights of a layer's experts, in memory twice: for a kernel set and for the oracle."""

    sizes: ExpertSizes
    weights: list[Weights]

    def fill(self, layer: LayerExperts) -> LayerExperts:
        for expert, own in enumerate(self.weights):
            layer.store(expert, *own)
        return layer

    def exact(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """By definition, in float64."""
        oracle = self.fill(reference.KERNELS.experts.allocate(self.sizes))
        return oracle(x.double(), ids, weights.double())

    def bound(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """How far float32 sums and stored values in the format of x may be from `exact`.

        A sum of n products is off by at most n * 2^-24 of the sum of their sizes, in any order; an
        error before the gate grows by its slope times the other factor.
        """
        sum_unit, unit, gate = 2.0**-23, UNIT[self.sizes.dtype], self.sizes.gate
        total = torch.zeros(x.shape, dtype=torch.float64)
        size = torch.zeros(x.shape, dtype=torch.float64)
        for row, experts in enumerate(ids.tolist()):
            for column, expert in enumerate(experts):
                if expert < 0:
                    continue
                gate_up, down, gate_up_bias, down_bias = (
                    None if part is None else part.double() for part in self.weights[expert]
                )
                own = x[row].double()
                both = own @ gate_up.T + (0 if gate_up_bias is None else gate_up_bias)
                off = (len(own) + 4) * sum_unit * (own.abs() @ gate_up.abs().T + both.abs())
                (g, u), (off_g, off_u) = both.chunk(2), off.chunk(2)
                high = g.abs() if gate.limit is None else g.abs().clamp(max=gate.limit)
                other = u.abs() if gate.limit is None else u.abs().clamp(max=gate.limit)
                other = other + abs(gate.up_offset)
                opened = high * other
                off = STEEPEST * off_g * other + high * off_u + (unit + 8 * sum_unit) * opened
                out = opened @ down.abs().T + (0 if down_bias is None else down_bias.abs())
                off = off @ down.abs().T + (len(opened) * sum_unit + unit) * out
                weight = weights[row, column].double()
                total[row] += weight * off
                size[row] += weight * out
        return total + (ids.shape[1] * sum_unit + unit) * size + 1e-30


@pytest.fixture
def make_bank() -> Callable[..., Bank]:
    def make(
        experts: int, hidden: int, intermediate: int, dtype: torch.dtype, gate: Gate | None = None,
        *, biases: bool = False, seed: int = 0,
    ) -> Bank:  # fmt: skip
        sizes = ExpertSizes(
            experts=experts, hidden=hidden, intermediate=intermediate, gate=gate or Gate(),
            biases=biases, dtype=dtype, device=torch.device("cpu"),
        )  # fmt: skip
        draw = torch.Generator().manual_seed(seed)

        def random(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=draw).to(dtype) / 2

        weights = [
            (
                random(2 * intermediate, hidden),
                random(hidden, intermediate),
                random(2 * intermediate) if biases else None,
                random(hidden) if biases else None,
            )
            for _ in range(experts)
        ]
        return Bank(sizes, weights)

    return make
