"""The comparison's bookkeeping: goals, prompts and sides that are processes."""

import sys
from argparse import Namespace
from functools import partial
from pathlib import Path

import pytest
import torch

from benchmarks.bench_engine import __main__ as bench_engine
from benchmarks.bench_engine.protocol import make_prompts, through_generate
from benchmarks.bench_engine.random_experts import (
    GGUF_NAME,
    Shape,
    write_folder,
    write_gguf,
)
from benchmarks.bench_engine.ratios import EXPERT_GOALS, GOALS, ratios
from benchmarks.bench_engine.sides import Case, ProcessSide, SideFailedError
from services.engine.compute.loader import load_model
from services.engine.contract.sampling_params import SamplingParams
from services.engine.offline.llm import LLM

_SIDE = """
import sys
sys.path.insert(0, sys.argv[1])
from protocol import answer
print("a library talks on stdout")
answer({"it": "1"}, lambda case: (case["batch"] * case["steps"], 0.5))
"""
_FOLDER = Path(__file__).parents[2] / "benchmarks" / "bench_engine"


def test_a_goal_is_measured_against_the_fastest_peer() -> None:
    best = {
        "ours int8": {"decode B=8": 300.0},
        "vllm bfloat16": {"decode B=8": 200.0},
        "vllm float32": {"decode B=8": 150.0},
    }
    lines = ratios(best)
    assert lines[0] == {
        "of": "ours int8",
        "to": "vllm bfloat16",
        "case": "decode B=8",
        "ratio": 1.5,
        "wanted": 1.5,
    }
    assert [(line["to"], line["ratio"], line["wanted"]) for line in lines[1:]] == [
        ("vllm bfloat16", 1.5, None),
        ("vllm float32", 2.0, None),
    ]
    assert ratios({"ours int8": {"prefill": 1.0}}) == []
    assert len({(goal.of, goal.case) for goal in GOALS}) == len(GOALS) == 8


def test_the_goals_of_experts_are_measured_against_wide_formats() -> None:
    best = {
        "ours int8": {"decode B=8": 300.0},
        "llama.cpp Q4_1": {"decode B=8": 400.0},
        "llama.cpp BF16": {"decode B=8": 200.0},
    }
    first = ratios(best, EXPERT_GOALS)[0]
    assert (first["to"], first["ratio"], first["wanted"]) == ("llama.cpp BF16", 1.5, 1.5)


def test_a_random_checkpoint_of_experts_is_served_from_both_of_its_forms(tmp_path: Path) -> None:
    shape = Shape(
        layers=2, hidden=32, heads=2, kv_heads=1, dim=16, experts=5, top_k=2, expert_size=32
    )
    count = write_folder(tmp_path, shape, seed=3)
    folder, file = load_model(str(tmp_path)), load_model(str(write_gguf(tmp_path)))
    assert count == sum(tensor.numel() for tensor in folder.weights.values())
    assert set(folder.weights) == set(file.weights)
    for name, tensor in folder.weights.items():
        assert torch.equal(file.weights[name].bfloat16(), tensor), name
    assert folder.config.moe == file.config.moe
    ids = []
    for source in (tmp_path, tmp_path / GGUF_NAME):
        with LLM(str(source), dtype="bfloat16", threads=1, num_blocks=16) as llm:
            params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
            ids.append(llm.generate([[5, 6, 7]], params)[0].choices[0].token_ids)
    assert ids[0] == ids[1]


def test_prompts_differ_and_hold_ordinary_ids() -> None:
    prompts = make_prompts(32, 128, 1) + make_prompts(32, 128, 2)
    assert {len(prompt) for prompt in prompts} == {128}
    assert len({tuple(prompt[:16]) for prompt in prompts}) == 64
    assert all(1000 <= token < 30_000 for prompt in prompts for token in prompt)


def test_decode_counts_what_comes_after_the_first_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 1.0, 10.0, 14.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(clock))
    calls = []
    measure = through_generate(lambda prompts, length: calls.append((len(prompts), length)))
    case = {"case": "decode", "batch": 4, "prompt": 8, "steps": 6, "seed": 0}
    assert measure(case) == (24, 3.0)
    assert calls == [(4, 1), (4, 7)]


def test_a_side_answers_although_its_libraries_print() -> None:
    side = ProcessSide("a side", [sys.executable, "-c", _SIDE, str(_FOLDER)], threads=1)
    try:
        assert side.versions == {"it": "1"}
        assert side.measure(Case("decode", 4, 8, 6), seed=0) == 48.0
        assert 0 < side.memory["rss"] <= side.memory["peak"]
    finally:
        side.close()


_BAD_SIDE = "import sys; sys.stderr.write('no such thing'); sys.exit(3)"


def test_a_side_that_cannot_start_says_why() -> None:
    with pytest.raises(SideFailedError, match=r"a side ended with 3:\n.*no such thing"):
        ProcessSide("a side", [sys.executable, "-c", _BAD_SIDE], threads=1)


def test_sides_that_run_alone_may_fail(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    code = {"good": [_SIDE, str(_FOLDER)], "left out": [_SIDE, str(_FOLDER)], "bad": [_BAD_SIDE]}
    makers = [
        (name, partial(ProcessSide, name, [sys.executable, "-c", *own], 1))
        for name, own in code.items()
    ]
    monkeypatch.setattr(bench_engine, "_makers", lambda options, folder: iter(makers))
    options = Namespace(
        alone=True,
        only=["good", "bad"],
        work=tmp_path,
        warm=False,
        rounds=1,
        prompt=4,
        steps=2,
        batches=[3],
    )
    found = bench_engine.run_sides(options)
    assert found.rates == {"good": {"prefill": [0.0], "decode B=3": [12.0]}}
    assert found.versions == {"good": {"it": "1"}}
    assert found.failed == {"bad": "no such thing"}
    options.alone = False
    with pytest.raises(SideFailedError, match="no such thing"):
        bench_engine.run_sides(options)
