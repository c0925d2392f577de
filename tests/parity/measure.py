"""Runs a case by every path and compares logits and greedy tokens with its reference's."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from services.engine.compute.model_runner import ModelRunner
from services.engine.contract.config import EngineConfig
from services.engine.contract.runner import SequenceMetadata
from services.engine.contract.sampling_params import SamplingParams
from services.engine.offline.llm import LLM
from tests.parity.cases import Case

BLOCK = 16
CHUNK = 13
LOGIT_PATHS = ("whole", "chunks of 13", "decode")
DECODED = 4
"""Positions before each compared one, itself included, that path "decode" computes one a round."""
TOKEN_PATHS = ("alone", "batched", "batched in chunks of 13", "on a cached prefix")


@dataclass(frozen=True, slots=True)
class Row:
    """A line of the table."""

    case: str
    path: str
    error: float | None
    """Largest difference of a logit; None: the path compares tokens only."""
    tokens_equal: bool


def measure(case: Case, folder: Path, *, tokens: bool = True, **fields: Any) -> Iterator[Row]:
    """Run a case by every path.

    Args:
        folder: where `case.write` wrote the model.
        tokens: whether to run the paths of TOKEN_PATHS too.
        fields: of EngineConfig.
    """
    runner = ModelRunner(EngineConfig(model=str(folder), threads=1, block_size=BLOCK, **fields))
    try:
        prompt, positions = case.golden["prompt_ids"], case.golden["positions"]
        ends = {
            "whole": [position + 1 for position in positions],
            "chunks of 13": [*range(CHUNK, len(prompt), CHUNK), len(prompt)],
            "decode": sorted(
                {end for p in positions for end in range(max(1, p - DECODED + 1), p + 2)}
            ),
        }
        for path in LOGIT_PATHS:
            got = _logits(runner, prompt, ends[path], again=path == "whole")
            yield _compared(case, path, got)
    finally:
        runner.close()
    if tokens:
        yield from _tokens(case, folder, fields)


def _logits(
    runner: ModelRunner, prompt: Sequence[int], ends: Sequence[int], *, again: bool
) -> dict[int, torch.Tensor]:
    """Logits by position: of the last one of each round.

    Args:
        ends: where the rounds end.
        again: each round begins at position 0, not where the one before it ended.
    """
    count = -(-len(prompt) // BLOCK)
    state = runner.describe().state
    runner.allocate(count + 1, 2 if state else 0)
    table = tuple(range(count, 0, -1))  # not in order
    found = {}
    start = 0
    for step, end in enumerate(ends):
        tokens, slot = tuple(prompt[start:end]), 1 if state else 0
        if state and not start:
            runner.clear_states([slot])
        meta = SequenceMetadata(0, start, tokens, None, table, sample=True, state_slot=slot)
        hidden: Any = runner.execute_main_model(step, [meta], None)
        found[end - 1] = hidden.logits[0]
        start = 0 if again else end
    return found


def _compared(case: Case, path: str, got: Mapping[int, torch.Tensor]) -> Row:
    pairs = [
        (got[position], torch.tensor(logits))
        for position, logits in zip(case.golden["positions"], case.golden["logits"], strict=True)
        if position in got
    ]
    assert pairs, f"{case.name}, {path}: no position has golden logits"
    error = max((ours - theirs).abs().max().item() for ours, theirs in pairs)
    equal = all(ours.argmax() == theirs.argmax() for ours, theirs in pairs)
    return Row(case.name, path, error, equal)


def _tokens(case: Case, folder: Path, fields: Mapping[str, Any]) -> Iterator[Row]:
    items = case.golden["items"]
    prompts = [item["prompt_ids"] for item in items]
    want = [item["output_ids"] for item in items]
    params = [
        SamplingParams(temperature=0, max_tokens=len(tokens), ignore_eos=True) for tokens in want
    ]
    sizes: dict[str, Any] = {"threads": 1, "num_blocks": 128, "block_size": BLOCK} | dict(fields)
    with LLM(str(folder), max_num_batched_tokens=512, **sizes) as llm:
        fresh = [llm.generate([p], [own])[0] for p, own in zip(prompts, params, strict=True)]
        yield Row(case.name, "alone", None, _ids(fresh) == want)
        yield Row(case.name, "batched", None, _ids(llm.generate(prompts, params)) == want)
        (warm,) = llm.generate(prompts[-1:], params[-1:])
        hit = warm.num_cached_tokens > 0 and _ids([warm]) == want[-1:]
        yield Row(case.name, "on a cached prefix", None, hit)
    with LLM(str(folder), max_num_batched_tokens=CHUNK, **sizes) as llm:
        cut = _ids(llm.generate(prompts, params))
        yield Row(case.name, "batched in chunks of 13", None, cut == want)


def _ids(outputs: Sequence[Any]) -> list[list[int]]:
    return [list(output.choices[0].token_ids) for output in outputs]
