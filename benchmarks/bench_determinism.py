"""How often the default mode's tokens differ in other company, and what deterministic mode costs.

    python -m benchmarks.bench_determinism --seeds 3 --tokens 64 --output benchmarks/results

The same requests run alone and whole (the reference), then all in one batch, then alone in chunks;
greedy and seeded; in the default mode in float32 and bfloat16, and in deterministic mode. Flips are
counted up to each answer's first difference: after it the two answers have different histories.
Costs are CPU seconds of this process, the modes in turn, because wall time would measure the
machine's other work.
"""

import argparse
import json
import math
import os
import platform
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

from services.engine.contract.sampling_params import SamplingParams
from services.engine.offline.llm import LLM

MODEL = "smollm2-135m-instruct"
PROMPTS = (
    "The harbour was quiet when the first boats came home. Nobody on the quay had expected them "
    "before the evening, and the children ran down to see what they had brought. One of them",
    "To make a good bread you need flour, water, salt and time. Begin by mixing the flour with "
    "two thirds of the water and leave it alone for half an hour. After that, the baker should",
    "def median(values):\n    '''Return the middle of a list of numbers, or the mean of the two "
    "in the middle if their count is even.'''\n    ordered = sorted(values)\n",
    "Question: A train leaves at nine and drives eighty kilometres an hour; another leaves an "
    "hour later at a hundred. When does the second one reach the first? Answer: Let us see. The",
    "In 1869 a chemist arranged the known elements by their weight and left gaps where none "
    "seemed to fit. The importance of those gaps became clear only later, since",
    "Dear Sir or Madam, I am writing to you about the order that I placed three weeks ago and "
    "that has not arrived. Your colleague told me on the telephone that",
)
CASES = ("alone", "batch", "chunked")
DEFAULT, BFLOAT16, DETERMINISTIC = "default", "default bfloat16", "deterministic"
MODES = {
    DEFAULT: {"deterministic": False, "dtype": "float32"},
    BFLOAT16: {"deterministic": False, "dtype": "bfloat16"},
    DETERMINISTIC: {"deterministic": True, "dtype": "float32"},
}


@dataclass
class Comparison:
    """One case beside the reference."""

    mode: str
    case: str
    answers: int = 0
    answers_that_differ: int = 0
    tokens_compared: int = 0
    """Up to each answer's first difference, that one included."""
    tokens: int = 0

    @property
    def flips_per_thousand(self) -> float:
        """First differences in a thousand comparable tokens."""
        return 1000 * self.answers_that_differ / max(1, self.tokens_compared)

    @property
    def flips_per_thousand_below(self) -> float:
        """Upper end of the exact 95 % interval (Clopper and Pearson, one-sided) of that rate."""
        low, high = 0.0, 1.0
        for _ in range(60):
            middle = (low + high) / 2
            tail = _at_most(self.answers_that_differ, self.tokens_compared, middle)
            low, high = (middle, high) if tail > 0.05 else (low, middle)
        return 1000 * high

    def add(self, want: Sequence[int], got: Sequence[int]) -> None:
        """Compare one answer."""
        same = 0
        for one, other in zip(want, got, strict=False):
            if one != other:
                break
            same += 1
        differs = list(want) != list(got)
        self.answers += 1
        self.answers_that_differ += differs
        self.tokens_compared += same + differs
        self.tokens += len(got)


def _at_most(count: int, trials: int, rate: float) -> float:
    """Probability of at most so many events in independent trials."""
    return sum(
        math.comb(trials, k) * rate**k * (1 - rate) ** (trials - k) for k in range(count + 1)
    )


class Mode:
    """The engines of one mode: whole prompts, and prompts in chunks."""

    def __init__(self, name: str, options: argparse.Namespace) -> None:
        self.name = name
        self._options = options
        fields = {"threads": options.threads, "num_blocks": 200, "prefix_cache": False}
        fields |= MODES[name]
        self._whole = LLM(MODEL, max_num_batched_tokens=1024, **fields)
        self._chunked = LLM(MODEL, max_num_batched_tokens=options.chunk, **fields)
        self.cpu_s = dict.fromkeys(CASES, 0.0)

    def run(self, case: str, requests: Sequence[tuple[str, SamplingParams]]) -> list[list[int]]:
        """Answers in order; adds the CPU time that they took."""
        llm = self._chunked if case == "chunked" else self._whole
        groups = [requests] if case == "batch" else [[one] for one in requests]
        started = time.process_time()
        outputs = []
        for group in groups:
            outputs += llm.generate([text for text, _ in group], [own for _, own in group])
        self.cpu_s[case] += time.process_time() - started
        return [list(output.choices[0].token_ids) for output in outputs]

    def close(self) -> None:
        """End both engines."""
        self._whole.close()
        self._chunked.close()


def samplings(tokens: int, seeds: int) -> Iterator[SamplingParams]:
    """Greedy and seeded draws that never end early."""
    common = {"max_tokens": tokens, "ignore_eos": True}
    yield SamplingParams(temperature=0.0, seed=0, **common)
    for seed in range(1, seeds + 1):
        yield SamplingParams(temperature=1.0, top_p=0.95, seed=seed, **common)


def measure(options: argparse.Namespace) -> tuple[list[Comparison], dict[str, dict[str, float]]]:
    """All comparisons, and the CPU seconds of each mode and case; progress on stderr."""
    modes = [Mode(name, options) for name in MODES]
    found = {(m.name, c): Comparison(m.name, c) for m in modes for c in CASES[1:]}
    for params in samplings(options.tokens, options.seeds):
        requests = [(prompt, params) for prompt in PROMPTS[: options.prompts]]
        reference: dict[str, list[list[int]]] = {}
        for case in CASES:
            for mode in modes:
                print(f"seed {params.seed} {case} {mode.name} …", file=sys.stderr, flush=True)
                answers = mode.run(case, requests)
                want = reference.setdefault(mode.name, answers)
                if case != "alone":
                    for one, other in zip(want, answers, strict=True):
                        found[mode.name, case].add(one, other)
    for mode in modes:
        mode.close()
    return list(found.values()), {mode.name: mode.cpu_s for mode in modes}


def main() -> None:
    """Print a table; with --output also write a dated JSON file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--prompts", type=int, default=len(PROMPTS), help="1 to 6")
    parser.add_argument("--tokens", type=int, default=48, help="tokens of each answer")
    parser.add_argument("--seeds", type=int, default=1, help="seeded answers a prompt")
    parser.add_argument("--chunk", type=int, default=16, help="positions a round, if chunked")
    parser.add_argument("--output", type=Path, help="folder for the JSON file")
    options = parser.parse_args()
    load_before = os.getloadavg()[0]
    comparisons, cpu_s = measure(options)
    costs = {case: cpu_s[DETERMINISTIC][case] / cpu_s[DEFAULT][case] for case in CASES}
    print(f"{'mode':18}{'case':9}{'answers':>8}{'differ':>8}{'flips per 1000 tokens':>23}  95 %")
    for c in comparisons:
        line = f"{c.mode:18}{c.case:9}{c.answers:>8}{c.answers_that_differ:>8}"
        print(f"{line}{c.flips_per_thousand:>23.2f}  < {c.flips_per_thousand_below:.2f}")
    for case, ratio in costs.items():
        print(f"cost of the deterministic mode, {case}: {ratio:.2f} × the default's CPU time")
    if options.output:
        date = datetime.now(UTC).isoformat(timespec="seconds")
        result = {
            "benchmark": "bench_determinism",
            "date": date,
            "command": "python -m benchmarks.bench_determinism " + " ".join(sys.argv[1:]),
            "model": MODEL,
            "modes": MODES,
            "threads": options.threads,
            "chunk": options.chunk,
            "tokens_per_answer": options.tokens,
            "cpu": platform.processor() or platform.machine(),
            "cores": os.cpu_count(),
            "torch": version("torch"),
            "python": platform.python_version(),
            "load_average": [load_before, os.getloadavg()[0]],
            "comparisons": [
                asdict(c)
                | {
                    "flips_per_thousand": round(c.flips_per_thousand, 3),
                    "flips_per_thousand_below": round(c.flips_per_thousand_below, 3),
                }
                for c in comparisons
            ],
            "cpu_s": cpu_s,
            "deterministic_cost": costs,
        }
        path = options.output / f"{date[:10]}-determinism.json"
        path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        print(f"written to {path}")


if __name__ == "__main__":
    main()
