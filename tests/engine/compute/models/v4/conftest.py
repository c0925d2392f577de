"""The tiny DeepSeek V4 on both kernel sets, and what transformers computes for it."""

from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch

from services.engine.compute.models.v4_modules.model import V4Model
from tests.doubles.tiny_v4 import tiny_weights
from tests.doubles.v4_driver import make_v4


class Golden(NamedTuple):
    """Of one prompt; written by make_golden.py."""

    prompt: list[int]
    logits: torch.Tensor
    """[tokens, vocabulary]."""
    greedy: list[int]


@pytest.fixture(scope="session")
def golden() -> list[Golden]:
    with np.load(Path(__file__).with_name("golden.npz")) as file:
        return [
            Golden(
                file[f"prompt_{number}"].tolist(),
                torch.from_numpy(file[f"logits_{number}"]),
                file[f"greedy_{number}"].tolist(),
            )
            for number in range(2)
        ]


def _model(kernels: str) -> V4Model:
    return make_v4(tiny_weights(), kernels)


@pytest.fixture(scope="session")
def model() -> V4Model:
    """On torch's operators."""
    return _model("torch")


@pytest.fixture(scope="session")
def tiled() -> V4Model:
    """On the kernel set of the deterministic mode."""
    return _model("torch-tiled")
