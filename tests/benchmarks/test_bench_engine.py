"""The comparison's bookkeeping: goals, prompts and sides that are processes."""

import sys
from pathlib import Path

import pytest

from benchmarks.bench_engine.protocol import make_prompts, through_generate
from benchmarks.bench_engine.ratios import GOALS, ratios
from benchmarks.bench_engine.sides import Case, ProcessSide, SideFailedError

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


def test_a_side_that_cannot_start_says_why() -> None:
    with pytest.raises(SideFailedError, match=r"a side ended with 3:\n.*no such thing"):
        ProcessSide(
            "a side",
            [sys.executable, "-c", "import sys; sys.stderr.write('no such thing'); sys.exit(3)"],
            threads=1,
        )
