"""The feed-forward part: experts chosen by biased scores, and one shared expert."""

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.engine.compute.models.v41_oracle.shape import Shape
from tests.engine.compute.models.v41_oracle.weights import Weights


def router_scores(logits: Tensor) -> Tensor:
    """sqrt(softplus)"""
    return F.softplus(logits).sqrt()


def choice(score: Tensor, bias: Tensor, count: int) -> Tensor:
    """[T, count] int64: the best by score and bias together; of equal ones, the lower id."""
    return (score + bias).argsort(dim=-1, descending=True, stable=True)[:, :count]


def shares(score: Tensor, chosen: Tensor, factor: float) -> Tensor:
    """[T, count]: scores without the bias, brought to a sum of `factor`."""
    own = score.gather(1, chosen)
    return own / (own.sum(-1, keepdim=True) + 1e-20) * factor


def gated(gate: Tensor, up: Tensor, limit: float) -> Tensor:
    """SwiGLU, the gate clamped above and the other side on both."""
    return F.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)


def expert(weights: Weights, at: str, x: Tensor, limit: float) -> Tensor:
    """[T, D] of x [T, D]: w1 is the gate, w3 the other side, w2 the way back."""
    gate, up = x @ weights[f"{at}.w1.weight"].T, x @ weights[f"{at}.w3.weight"].T
    return gated(gate, up, limit) @ weights[f"{at}.w2.weight"].T


def feed_forward(shape: Shape, weights: Weights, layer: int, x: Tensor) -> Tensor:
    """[T, D] of x [T, D]."""
    at = f"layers.{layer}.ffn"
    score = router_scores(x @ weights[f"{at}.gate.weight"].T)
    chosen = choice(score, weights[f"{at}.gate.bias"], shape.num_experts_per_tok)
    share = shares(score, chosen, shape.routed_scaling_factor)
    total = torch.zeros_like(x)
    for number in range(shape.n_routed_experts):
        part = (share * (chosen == number)).sum(-1, keepdim=True)
        total = total + part * expert(weights, f"{at}.experts.{number}", x, shape.swiglu_limit)
    return total + expert(weights, f"{at}.shared_experts", x, shape.swiglu_limit)
