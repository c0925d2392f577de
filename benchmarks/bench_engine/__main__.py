"""Tokens per second of the whole engine beside transformers, llama.cpp and vLLM, in one run.

    python -m benchmarks.bench_engine --threads 2 --llama-cpp DIR --vllm PYTHON \\
        --output benchmarks/results

Sides that have no path are left out, transformers if it is not installed. Every side is a process
of its own and does the same: 128 tokens in, greedy, 128 out. They take turns at each case, so that
a busy neighbour hits all of them, unless --alone runs one after another. Each figure is the best of
the rounds.
"""

import argparse
import contextlib
import importlib.util
import itertools
import json
import os
import platform
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from benchmarks.bench_engine.export import export_folder
from benchmarks.bench_engine.random_experts import GGUF_NAME
from benchmarks.bench_engine.ratios import EXPERT_GOALS, GOALS, ratios
from benchmarks.bench_engine.sides import (
    HERE,
    Case,
    LlamaCppSide,
    ProcessSide,
    Side,
    SideFailedError,
    llama_formats,
    llama_models,
    python_side,
)
from services.engine.model_files.known_models import find_model

Rates = dict[str, dict[str, list[float]]]
"""Tokens per second: side, case, rounds."""


Memory = dict[str, dict[str, int]]
"""Bytes by the sides that report them."""


@dataclass
class Found:
    """What the sides gave, by their names."""

    rates: Rates = field(default_factory=dict)
    memory: Memory = field(default_factory=dict)
    versions: dict[str, dict[str, str]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    """Why a side has no figures; with --alone only, as otherwise its end ends the run."""


def run_sides(options: argparse.Namespace) -> Found:
    """Measure all sides in turn, or with --alone one after another, each with the memory to itself.

    Raises:
        SideFailedError: a side cannot be run, without --alone.
    """
    found = Found()
    with contextlib.ExitStack() as stack:
        folder = options.work or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        makers = [
            make
            for name, make in _makers(options, folder)
            if not options.only or name in options.only
        ]
        for group in [[make] for make in makers] if options.alone else [makers]:
            try:
                with started(group) as sides:
                    measure(sides, options, found)
            except SideFailedError as error:
                if not options.alone:
                    raise
                print(error, file=sys.stderr)
                name, _, why = str(error).partition(" ended with ")
                found.failed[name] = why.splitlines()[-1].strip()
    return found


@contextlib.contextmanager
def started(makers: Sequence[Callable[[], Side]]) -> Iterator[list[Side]]:
    """Start sides; end them on exit."""
    with contextlib.ExitStack() as stack:
        sides: list[Side] = []
        for make in makers:
            side = make()
            stack.callback(side.close)
            print(f"ready: {side.name}", file=sys.stderr, flush=True)
            sides.append(side)
        yield sides


def _makers(options: argparse.Namespace, folder: Path) -> Iterator[tuple[str, Callable[[], Side]]]:
    """Name and start of each side."""
    threads, seqs = options.threads, max(options.batches)
    tokens = seqs * options.prompt
    for dtype in options.dtypes:
        mode = " deterministic" if options.deterministic else ""
        name, flag = f"ours {dtype}{mode}", int(options.deterministic)
        start = partial(python_side, name, "ours_side", threads, options.model or "", dtype)
        yield name, partial(start, threads, seqs, tokens, flag)
    peers_model = options.model or folder / "model"
    if not options.model and (options.transformers or options.vllm):
        export_folder(peers_model)
    if options.transformers:
        name = "transformers float32"
        start = partial(python_side, name, "transformers_side", threads, peers_model)
        yield name, partial(start, "float32", threads)
    if options.llama_cpp:
        build = options.llama_cpp.resolve()
        if options.model:
            models = llama_formats(build, options.model / GGUF_NAME, folder)
        else:
            models = llama_models(build, options.gguf or find_model("").path, folder)
        for dtype, path in models.items():
            yield f"llama.cpp {dtype}", partial(LlamaCppSide, build, path, dtype, threads)
    ways = itertools.product(("bfloat16", "float32"), ("", " compiled")) if options.vllm else ()
    for dtype, way in ways:
        command = [options.vllm, HERE / "vllm_side.py", peers_model, dtype]
        command += [threads, seqs, tokens, int(bool(way))]
        name = f"vllm {dtype}{way}"
        yield name, partial(ProcessSide, name, [str(part) for part in command], threads, HERE)


def measure(sides: Sequence[Side], options: argparse.Namespace, found: Found) -> None:
    """Put all rounds into `found`, and the memory of the sides that report it after the last."""
    cases = [Case("prefill", 1, options.prompt, 0)]
    cases += [Case("decode", batch, options.prompt, options.steps) for batch in options.batches]
    rates: Rates = {side.name: {case.name: [] for case in cases} for side in sides}
    for turn in range(-1 if options.warm else 0, options.rounds):
        for case in cases:
            short = case if turn >= 0 else Case(case.case, case.batch, case.prompt, 2)
            for side in sides:
                rate = side.measure(short, seed=turn + 1)
                if turn >= 0:
                    rates[side.name][case.name].append(round(rate, 2))
                print(f"round {turn} {case.name} {side.name}: {rate:.1f}", file=sys.stderr)
    found.rates |= rates
    found.memory |= {side.name: side.memory for side in sides if side.memory}
    found.versions |= {side.name: side.versions for side in sides}


def report(options: argparse.Namespace, found: Found) -> dict:
    """What a reader needs to judge the figures."""
    best = {name: {case: max(v) for case, v in own.items()} for name, own in found.rates.items()}
    return {
        "benchmark": "bench_engine",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": "python -m benchmarks.bench_engine " + " ".join(map(_shown, sys.argv[1:])),
        "model": options.model.name if options.model else find_model("").name,
        "threads": options.threads,
        "prompt_tokens": options.prompt,
        "decode_steps": options.steps,
        "cpu": _cpu_name(),
        "cpus": os.cpu_count(),
        "python": platform.python_version(),
        "versions": found.versions,
        "load_average": [round(value, 2) for value in os.getloadavg()],
        "unit": "tokens/s, best round",
        "best": best,
        "rounds": found.rates,
        "failed": found.failed,
        "memory_mib": {
            name: {key: value >> 20 for key, value in own.items()}
            for name, own in found.memory.items()
        },
        "ratios": ratios(best, EXPERT_GOALS if options.model else GOALS),
    }


def table(best: Mapping[str, Mapping[str, float]]) -> str:
    """For people."""
    cases = list(next(iter(best.values())))
    rows = [f"{'':26}" + "".join(f"{case:>14}" for case in cases)]
    for name, own in best.items():
        rows.append(f"{name:26}" + "".join(f"{own[case]:>14.1f}" for case in cases))
    return "\n".join(rows)


def _shown(argument: str) -> str:
    """The last part of a path: records do not name folders of the machine."""
    return f"…/{Path(argument).name}" if argument.startswith("/") else argument


def _cpu_name() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def parse() -> argparse.Namespace:
    """Flags."""
    parser = argparse.ArgumentParser(
        prog="benchmarks.bench_engine",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--model", type=Path, help="a folder that random_experts wrote; default: our default model"
    )
    parser.add_argument("--dtypes", nargs="+", default=["float32", "int8"], help="ours")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="of every side")
    parser.add_argument("--deterministic", action="store_true", help="our deterministic mode")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--prompt", type=int, default=128, help="tokens in each prompt")
    parser.add_argument("--steps", type=int, default=127, help="tokens of decode, after the first")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument(
        "--alone",
        action="store_true",
        help="run the sides one after another, for models of which memory holds one at a time",
    )
    parser.add_argument("--no-warm", dest="warm", action="store_false", help="no short round first")
    parser.add_argument(
        "--no-transformers",
        dest="transformers",
        action="store_false",
        default=importlib.util.find_spec("transformers") is not None,
        help="default: run it if it is installed",
    )
    parser.add_argument("--only", nargs="+", metavar="SIDE", help="these sides, by their names")
    parser.add_argument("--llama-cpp", type=Path, metavar="DIR", help="a build with bin/ in it")
    parser.add_argument("--gguf", type=Path, help="its Q4_1 file; default: our default model's")
    parser.add_argument("--vllm", metavar="PYTHON", help="a Python that has vLLM's CPU build")
    parser.add_argument("--work", type=Path, help="keep models made for peers here")
    parser.add_argument("--output", type=Path, help="folder for the JSON file")
    options = parser.parse_args()
    if options.work:
        options.work.mkdir(parents=True, exist_ok=True)
    if options.model:
        options.model = options.model.resolve()
    return options


def main() -> None:
    """Print a table; with --output also write a dated JSON file."""
    options = parse()
    result = report(options, run_sides(options))
    print(table(result["best"]))
    for line in result["ratios"]:
        print(f"{line['of']} / {line['to']}, {line['case']}: {line['ratio']}", end="")
        print(f" (wanted {line['wanted']})" if line["wanted"] else "")
    for name, own in result["memory_mib"].items():
        print(
            f"{name}: {own['rss']} MiB resident after B={max(options.batches)}, {own['peak']} peak"
        )
    if options.output:
        options.output.mkdir(parents=True, exist_ok=True)
        mode = "-deterministic" if options.deterministic else ""
        name = "experts" if options.model else "engine"
        path = options.output / f"{result['date'][:10]}-{name}{mode}.json"
        path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        print(f"written to {path}")


if __name__ == "__main__":
    main()
