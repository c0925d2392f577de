"""Tokens per second of the engine's runner beside transformers, in the same run.

    python -m benchmarks.bench_engine --threads 2 --output benchmarks/results

Needs transformers, which nothing else does: `pip install "transformers>=5.24,<6"`. Each figure is
the best of several rounds, ours and the peer's in turn, so that a busy neighbour hits both. The
peer of int8 is float32, and our own float32 runs beside it.
"""

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import torch

from benchmarks.bench_engine.ours import Ours
from benchmarks.bench_engine.peer import Peer


@dataclass(frozen=True)
class Figure:
    """One line of the table; rates are tokens per second."""

    case: str
    batch: int
    ours: float
    transformers: float
    ratio: float
    ours_float32: float | None = None
    """Of int8 only."""


def rate(work: Callable[[], int]) -> float:
    """Tokens per second of one round."""
    started = time.perf_counter()
    tokens = work()
    return tokens / (time.perf_counter() - started)


def measure(options: argparse.Namespace) -> list[Figure]:
    """All cases, progress on stderr."""
    torch.set_num_threads(options.threads)
    ours = Ours(options.dtype, options.threads, deterministic=options.deterministic)
    int8 = options.dtype == "int8"
    makers: list[Ours | Peer] = [ours, Peer(ours.source, "float32" if int8 else options.dtype)]
    if int8:
        makers.append(Ours("float32", options.threads, deterministic=False))
    figures = []
    cases = [("prefill", 1), *(("decode", batch) for batch in options.batches)]
    for case, batch in cases:
        print(f"{case} B={batch} …", file=sys.stderr, flush=True)
        works = [
            maker.prefill(options.prompt)
            if case == "prefill"
            else maker.decode(batch, options.prompt, options.steps)
            for maker in makers
        ]
        rates = [0.0] * len(makers)
        for _ in range(options.rounds):
            for index, work in enumerate(works):
                rates[index] = max(rates[index], rate(work))
        figures.append(Figure(case, batch, rates[0], rates[1], rates[0] / rates[1], *rates[2:]))
    return figures


def report(options: argparse.Namespace, figures: Sequence[Figure]) -> dict:
    """What a reader needs to judge the figures."""
    return {
        "benchmark": "bench_engine",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": "python -m benchmarks.bench_engine " + " ".join(sys.argv[1:]),
        "model": "smollm2-135m-instruct",
        "dtype": options.dtype,
        "deterministic": options.deterministic,
        "threads": options.threads,
        "prompt_tokens": options.prompt,
        "cpu": platform.processor() or platform.machine(),
        "versions": {name: version(name) for name in ("torch", "transformers")},
        "python": platform.python_version(),
        "load_average": os.getloadavg()[0],
        "unit": "tokens/s, best round",
        "figures": [asdict(figure) for figure in figures],
    }


def main() -> None:
    """Print a table; with --output also write a dated JSON file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "int8"))
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--deterministic", action="store_true", help="our deterministic mode")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--prompt", type=int, default=128, help="tokens in each prompt")
    parser.add_argument("--steps", type=int, default=16, help="decode steps in a round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path, help="folder for the JSON file")
    options = parser.parse_args()
    figures = measure(options)
    result = report(options, figures)
    print(f"{'case':10}{'B':>4}{'ours':>10}{'transformers':>14}{'ratio':>8}")
    for f in figures:
        print(f"{f.case:10}{f.batch:>4}{f.ours:>10.1f}{f.transformers:>14.1f}{f.ratio:>8.2f}")
    if options.output:
        options.output.mkdir(parents=True, exist_ok=True)
        mode = "-deterministic" if options.deterministic else ""
        name = f"{result['date'][:10]}-engine-{options.dtype}{mode}.json"
        (options.output / name).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        print(f"written to {options.output / name}")


if __name__ == "__main__":
    main()
