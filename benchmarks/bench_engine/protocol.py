"""What a side of the comparison answers, over lines of JSON: how long a case took.

Standard library alone: it also runs under a peer's own Python. A side is a process, so that each
has its own number of threads and its own memory.
"""

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

Generate = Callable[[Sequence[Sequence[int]], int], None]
"""(prompts, tokens each): completes all of them, greedily, past any end token."""

_LOWEST_ID, _IDS = 1000, 29_000
"""Ids of ordinary text."""


def answer(versions: dict[str, str], measure: Callable[[dict], tuple[int, float]]) -> None:
    """Serve until stdin ends: one case a line in, tokens, seconds and memory out."""
    with _own_stdout() as out:
        _say(out, {"ready": versions, **memory()})
        for line in sys.stdin:
            tokens, seconds = measure(json.loads(line))
            _say(out, {"tokens": tokens, "seconds": seconds, **memory()})


def through_generate(generate: Generate) -> Callable[[dict], tuple[int, float]]:
    """Cases of a whole engine: decode is what more tokens take beyond the first ones."""

    def measure(case: dict) -> tuple[int, float]:
        prompts = make_prompts(case["batch"], case["prompt"], case["seed"])
        first = _seconds(generate, prompts, 1)
        if case["case"] == "prefill":
            return case["batch"] * case["prompt"], first
        both = _seconds(generate, prompts, 1 + case["steps"])
        return case["batch"] * case["steps"], both - first

    return measure


def make_prompts(count: int, length: int, seed: int) -> list[list[int]]:
    """Token ids that no two prompts share."""
    return [
        [
            _LOWEST_ID + (seed * 7919 + row * 104_729 + place * 31 * (row + 1)) % _IDS
            for place in range(length)
        ]
        for row in range(count)
    ]


def memory() -> dict[str, int]:
    """Bytes of this process: now, and at its worst."""
    found = {"rss": 0, "peak": 0}
    keys = {"VmRSS": "rss", "VmHWM": "peak"}
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
            key, _, value = line.partition(":")
            if key in keys:
                found[keys[key]] = int(value.split()[0]) << 10
    return found


def _seconds(generate: Generate, prompts: Sequence[Sequence[int]], length: int) -> float:
    started = time.perf_counter()
    generate(prompts, length)
    return time.perf_counter() - started


@contextlib.contextmanager
def _own_stdout():
    """The real stdout for answers; what libraries print goes to stderr."""
    copy = os.dup(1)
    os.dup2(2, 1)
    with os.fdopen(copy, "w", encoding="utf-8") as out:
        yield out


def _say(out, message: dict) -> None:
    out.write(json.dumps(message) + "\n")
    out.flush()
