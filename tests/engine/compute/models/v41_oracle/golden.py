"""The scenarios of `golden.npz`: logits of the tiny shape, for the engine's model to be held to.

Computed in float64. `python -m tests.engine.compute.models.v41_oracle.golden` writes the file.
"""

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from tests.engine.compute.models.v41_oracle import engram
from tests.engine.compute.models.v41_oracle.oracle import Oracle, engram_rows, replayed
from tests.engine.compute.models.v41_oracle.shape import Shape
from tests.engine.compute.models.v41_oracle.weights import random_weights, uniform

FILE = Path(__file__).parents[4] / "data" / "v41_golden.npz"
SHAPE = Shape()
SEED = 8
"""One whose scores and quantised values stay clear of ties: relative noise of 3e-7 on all weights
moves no logit by more than 1e-5. With most seeds, one rounds the other way and moves some by 0.1.
"""
TEXTS = [*map(chr, range(32, 127)), "\u00e9"]
"""Of the tokens: letters share a compressed id with their capitals, the last one with "e"."""
COMPRESSED = engram.compressed_ids(TEXTS, TEXTS)
TOKENS = [int(value * 48 + 48) for value in uniform((40,), 99)]
HIT, KEPT = 26, 12
"""Where the replay finds history, and rows that the decoder keeps of all."""


def oracle(dtype: torch.dtype) -> Oracle:
    """The tiny model; its weights are equal in every dtype."""
    weights = random_weights(SHAPE, engram_rows(SHAPE), SEED, dtype)
    return Oracle(SHAPE, weights, COMPRESSED)


def whole(model: Oracle) -> Tensor:
    """[40, 96]: all tokens in one call."""
    return model.forward(TOKENS)[0]


def replay(model: Oracle) -> Tensor:
    """[22, 96]: the tokens from the window before HIT on, with the history of a cold request.

    The first 8 rows are the replayed ones; nothing is sampled from them.
    """
    _, cold = model.forward(TOKENS)
    state = replayed(SHAPE, cold, HIT)
    return model.forward(TOKENS[len(state.tokens) :], state)[0]


def cut(model: Oracle) -> Tensor:
    """[12, 96]: the last rows of all, the decoder having run on them alone."""
    return model.forward(TOKENS, decoder_from=len(TOKENS) - KEPT)[0]


SCENARIOS: Mapping[str, Callable[[Oracle], Tensor]] = {
    "whole": whole,
    "replay": replay,
    "cut": cut,
}


def main() -> None:
    """Write the file."""
    model = oracle(torch.float64)
    arrays = {name: run(model).numpy().astype(np.float32) for name, run in SCENARIOS.items()}
    FILE.parent.mkdir(exist_ok=True)
    np.savez_compressed(FILE, tokens=TOKENS, compressed=COMPRESSED, **arrays)
    print(f"{FILE.name}: {FILE.stat().st_size} bytes")


if __name__ == "__main__":
    main()
