"""Writes v41_golden.npz: what the oracle computes for the tiny DeepSeek V4.1, in float64.

Run it with `python -m tests.engine.compute.models.v4.make_v41_golden`. It takes the first random
prompts of both lengths whose answers stay clear of ties: with most, some quantised value, expert or
index entry is so near one that float32 takes the other side, and logits then differ by up to 0.1.
With `--search` it looks for them; otherwise it takes those found before.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from tests.engine.compute.models.v41_oracle import golden
from tests.engine.compute.models.v41_oracle.oracle import Oracle, replayed
from tests.engine.compute.models.v41_oracle.weights import uniform

FILE = Path(__file__).with_name("v41_golden.npz")
KEYS = {45: 201, 70: 202}
"""By length of the prompt: the key of its tokens."""
NEW_TOKENS = 24
HIT, REPLAYED_TOKENS = 64, 12
"""Of the longer prompt, with bounded replay."""
NOISE = 6e-7
"""Relative, of all weights; float32 rounds by 6e-8."""
MOST = 3e-5
"""Difference of a logit that noise may make."""
MARGIN = 1e-3
"""Between the two best logits of a generated token, at least."""


def prompt_of(length: int, key: int) -> list[int]:
    """Random tokens."""
    return [int(value * 48 + 48) for value in uniform((length,), key)]


def answer(model: Oracle, prompt: list[int]) -> tuple[list[int], float]:
    """The greedy tokens, and the least margin of one."""
    logits, state = model.forward(prompt)
    tokens: list[int] = []
    least = float("inf")
    while True:
        best = logits[-1].topk(2)
        least = min(least, float(best.values[0] - best.values[1]))
        tokens.append(int(best.indices[0]))
        if len(tokens) == NEW_TOKENS:
            return tokens, least
        logits, state = model.forward(tokens[-1:], state)


def disturbed(exact: Oracle) -> Iterator[Oracle]:
    """The model in float32, and with noise on its weights."""
    yield golden.oracle(torch.float32)
    for seed in range(2):
        yield Oracle(
            exact.shape,
            {
                name: tensor * (1 + NOISE * torch.from_numpy(uniform(tuple(tensor.shape), key)))
                for key, (name, tensor) in enumerate(exact.weights.items(), start=1000 * seed)
            },
            exact.compressed,
        )


def is_clear(exact: Oracle, others: list[Oracle], tokens: list[int]) -> bool:
    """Whether noise moves no logit of the tokens by more than MOST."""
    want = exact.forward(tokens)[0]
    return all(
        bool((other.forward(tokens)[0].double() - want).abs().max() <= MOST) for other in others
    )


def replayed_answer(model: Oracle, prompt: list[int]) -> tuple[torch.Tensor, list[int]]:
    """Logits of the prompt's last token and greedy tokens, on a hit of HIT positions."""
    state = replayed(model.shape, model.forward(prompt)[1], HIT)
    logits, state = model.forward(prompt[len(state.tokens) :], state)
    first, tokens = logits[-1], []
    while len(tokens) < REPLAYED_TOKENS:
        tokens.append(int(logits[-1].argmax()))
        logits, state = model.forward(tokens[-1:], state)
    return first, tokens


def search(exact: Oracle, others: list[Oracle], length: int, first: int) -> int:
    """The first key from `first` on whose prompt and answer stay clear of ties."""
    key = first
    while True:
        prompt = prompt_of(length, key)
        if is_clear(exact, others, prompt):
            tokens, margin = answer(exact, prompt)
            if margin >= MARGIN and is_clear(exact, others, prompt + tokens):
                return key
        key += 1


def main() -> None:
    """Write the file."""
    exact = golden.oracle(torch.float64)
    others = list(disturbed(exact))
    arrays = {}
    for number, (length, key) in enumerate(KEYS.items()):
        if "--search" in sys.argv:
            key = search(exact, others, length, 200)
            print(f"length {length}: key {key}", flush=True)
        prompt = prompt_of(length, key)
        arrays[f"prompt_{number}"] = np.array(prompt)
        arrays[f"logits_{number}"] = exact.forward(prompt)[0].numpy().astype(np.float32)
        arrays[f"greedy_{number}"] = np.array(answer(exact, prompt)[0])
        assert is_clear(exact, others, [*prompt, *arrays[f"greedy_{number}"].tolist()])
    logits, tokens = replayed_answer(exact, prompt)
    for other in others:
        found, same = replayed_answer(other, prompt)
        assert same == tokens
        assert bool((found.double() - logits).abs().max() <= MOST), "the replay is near a tie"
    arrays |= {"replay_logits": logits.numpy().astype(np.float32), "replay_greedy": tokens}
    np.savez_compressed(FILE, **arrays)
    print(f"{FILE.name}: {FILE.stat().st_size} bytes")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
