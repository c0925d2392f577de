"""A bank of random experts, the plain loop over all of them, and a tiny model with experts."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu

from kernels import dispatch
from services.engine.compute.expert_parallel.bank import ExpertBank
from services.engine.compute.expert_parallel.experts import Experts
from services.engine.compute.models.expert_weights import ExpertWeights, expert_names
from services.engine.compute.ranks.groups import LoneGroup
from services.engine.contract.expert_placement import first_placement
from services.engine.contract.runner import ExpertPlacement, ExpertShape
from tests.doubles.tiny_model import TinyShape, write_tiny_model

HIDDEN, MIDDLE, NUM_EXPERTS, NUM_LAYERS = 16, 32, 8, 2


@dataclass
class RandomExperts:
    """Weights of all experts, and their outputs by definition."""

    weights: ExpertWeights

    def lone(self, redundant: int = 0, placement: ExpertPlacement | None = None) -> Experts:
        """All slots on one rank."""
        shape = ExpertShape(NUM_LAYERS, NUM_EXPERTS, NUM_EXPERTS + redundant, 1)
        first = placement or first_placement(shape, "r")
        bank = ExpertBank(self.weights, dispatch.load("torch"), shape, 0, first)
        return Experts(bank, shape, LoneGroup(), window=10)

    def dense(self, layer: int, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """One row and one expert at a time."""
        out = torch.zeros_like(x)
        for row in range(len(x)):
            for expert, weight in zip(ids[row].tolist(), weights[row], strict=True):
                if expert >= 0:
                    names = self.weights.names[layer][expert]
                    gate, up, down = (self.weights.weights[name] for name in names)
                    out[row] += weight * (down @ (silu(gate @ x[row]) * (up @ x[row])))
        return out


@pytest.fixture
def random_experts() -> RandomExperts:
    """Equal in every process that seeds alike."""
    draw = torch.Generator().manual_seed(5)

    def one() -> tuple[Tensor, Tensor, Tensor]:
        gate, up = (torch.randn(MIDDLE, HIDDEN, generator=draw) for _ in range(2))
        return gate, up, torch.randn(HIDDEN, MIDDLE, generator=draw)

    names = tuple(
        tuple(expert_names(layer, expert) for expert in range(NUM_EXPERTS))
        for layer in range(NUM_LAYERS)
    )
    tensors = {
        name: tensor
        for layer in names
        for expert in layer
        for name, tensor in zip(expert, one(), strict=True)
    }
    return RandomExperts(ExpertWeights(tensors, names, HIDDEN, torch.float32, torch.device("cpu")))


@pytest.fixture(scope="session")
def tiny_moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """8 experts in each of 2 layers, 2 a row."""
    shape = TinyShape(kind="qwen3_moe", seed=4, tie_embeddings=False)
    return write_tiny_model(tmp_path_factory.mktemp("tiny-moe") / "m", shape)


@pytest.fixture
def make_case() -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    """Rows, chosen experts and their weights; `ids` by hand or random."""

    def make(rows: int, seed: int, ids=None, top_k: int = 2) -> tuple[Tensor, Tensor, Tensor]:
        draw = torch.Generator().manual_seed(seed)
        if ids is None:
            scores = torch.rand(rows, NUM_EXPERTS, generator=draw)
            ids = scores.topk(top_k).indices
        else:
            ids = torch.tensor(ids, dtype=torch.long).view(rows, len(ids[0]) if ids else top_k)
        x = torch.randn(rows, HIDDEN, generator=draw)
        return x, ids, torch.rand(ids.shape, generator=draw)

    return make
