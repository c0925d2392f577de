"""The tiny DeepSeek V4 and V4.1 on both kernel sets, and what their references compute for them.

The reference of V4 is transformers, that of V4.1 an oracle of this repository.
"""

from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch

from services.engine.compute.models.v4_modules.model import V4Model
from services.engine.compute.models.v41_modules.model import V41Model
from tests.doubles.tiny_v4 import tiny_weights
from tests.doubles.tiny_v41 import tiny_v41_config, tiny_v41_weights
from tests.doubles.v4_driver import make_tiny, make_v4


class Golden(NamedTuple):
    """Of one prompt; written by make_golden.py and make_v41_golden.py."""

    prompt: list[int]
    logits: torch.Tensor
    """[tokens, vocabulary]."""
    greedy: list[int]


@pytest.fixture(scope="session", params=["v4", "v41"])
def family(request: pytest.FixtureRequest) -> str:
    """Which of the two."""
    return str(request.param)


@pytest.fixture(scope="session")
def golden(family: str) -> list[Golden]:
    name = "golden.npz" if family == "v4" else "v41_golden.npz"
    with np.load(Path(__file__).with_name(name)) as file:
        return [
            Golden(
                file[f"prompt_{number}"].tolist(),
                torch.from_numpy(file[f"logits_{number}"]),
                file[f"greedy_{number}"].tolist(),
            )
            for number in range(2)
        ]


def _model(family: str, kernels: str) -> V4Model | V41Model:
    if family == "v4":
        return make_v4(tiny_weights(), kernels)
    model: V41Model = make_tiny(tiny_v41_config(), tiny_v41_weights(), kernels)
    return model


@pytest.fixture(scope="session")
def model(family: str) -> V4Model | V41Model:
    """On torch's operators."""
    return _model(family, "torch")


@pytest.fixture(scope="session")
def tiled(family: str) -> V4Model | V41Model:
    """On the kernel set of the deterministic mode."""
    return _model(family, "torch-tiled")
