"""Lets a tiny model answer one prompt with a given text, which may hold a tool call."""

from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from services.engine.compute.model_runner import ModelRunner
from services.engine.contract.config import EngineConfig
from services.engine.contract.runner import SequenceMetadata

_BLOCK = 32
_MARGIN = 10.0
"""By how much the logit of the wanted token is above all others."""


def learn_answer(folder: Path, prompt: Sequence[int], answer: Sequence[int]) -> None:
    """Change the head of a tiny DeepSeek V4 so that its greedy answer to the prompt is `answer`.

    The hidden states before each token do not depend on the head. So the head's change is the
    smallest one that gives the wanted logits at all of them at once (pseudo-inverse).

    Args:
        folder: a folder in float32; rewritten in place.
        answer: at most `hidden_size` tokens.
    """
    file = folder / "model.safetensors"
    weights = load_file(file)
    rows = _last_rows(folder, [*prompt, *answer[:-1]], len(answer)).double()
    rows *= (rows.square().mean(1, keepdim=True) + 1e-6).rsqrt() * weights["norm.weight"]
    assert len(answer) <= rows.shape[1], f"{len(answer)} tokens, at most {rows.shape[1]}"
    logits = rows @ weights["head.weight"].double().T
    change = torch.zeros_like(logits)
    wanted = torch.tensor(answer).unsqueeze(1)
    best = logits.amax(1, keepdim=True)
    change.scatter_(1, wanted, best - logits.gather(1, wanted) + _MARGIN)
    weights["head.weight"] += (torch.linalg.pinv(rows) @ change).T.float()
    save_file(weights, file, {"format": "pt"})


def _last_rows(folder: Path, tokens: list[int], count: int) -> torch.Tensor:
    """Hidden states [count, hidden] of the last tokens, before the last norm."""
    runner = ModelRunner(EngineConfig(model=str(folder), threads=1, block_size=_BLOCK))
    try:
        blocks = -(-len(tokens) // _BLOCK)
        runner.allocate(blocks + 1, 2)
        runner.clear_states([1])
        table = tuple(range(1, blocks + 1))
        whole = SequenceMetadata(0, 0, tuple(tokens), None, table, sample=True, state_slot=1)
        hidden, _ = runner.forward([whole], None)
        return hidden[-count:].clone()
    finally:
        runner.close()
