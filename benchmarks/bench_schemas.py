"""How many JSON schemas of a folder are served, how well, and how fast, beside the stock engines.

    python -m benchmarks.bench_schemas PATH [--output DIR] [--resume FILE] [--limit N] [--seed 1]

Each file of PATH is `{"schema": …, "tests": [{"valid": true, "data": …}, …]}`. Three sides take
every file: ours (the check, then xgrammar or llguidance), stock xgrammar, stock llguidance. Each
side runs in a process of its own, which is replaced when it crashes or takes too long. `wrong`
counts invalid instances that a side accepts, `narrower` valid ones that it does not produce. Times
are CPU times, so other work on the machine does not count. Files come in a random order, so an
interrupted run (Ctrl-C) is a sample; its result says how many files it covers. With `--resume` each
file's result is kept in FILE, and the next run with FILE goes on from there.
"""

import argparse
import json
import multiprocessing
import os
import platform
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import date
from importlib.metadata import version
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

SIDES = ("ours", "xgrammar", "llguidance")
LIMIT_S = 60.0
"""CPU seconds that a side may take for one file."""
MAX_INSTANCE_BYTES = 20_000
MASKS_PER_SCHEMA = 100
_END = 258
_SIZE = 300

Step = Callable[[int], bool]


@dataclass(frozen=True, slots=True)
class Compiled:
    """A schema that one side serves."""

    engine: str
    start: Callable[[], tuple[Step, Callable[[], Any], Callable[[], bool]]]
    """Returns functions of a new matcher: accept a byte, compute a mask, is the text complete."""


@dataclass
class Score:
    """What one side did."""

    files: int = 0
    engines: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    failed: list[str] = field(default_factory=list)
    right: int = 0
    narrower: int = 0
    wrong: int = 0
    wrong_files: list[str] = field(default_factory=list)
    compile_s: list[float] = field(default_factory=list)
    mask_us: list[float] = field(default_factory=list)
    cpu_s: float = 0.0

    def add(self, name: str, result: dict[str, Any] | None) -> None:
        """Count one file; None if the side crashed or took too long."""
        self.files += 1
        self.cpu_s += result["cpu_s"] if result is not None else LIMIT_S
        if result is None:
            self.failed.append(name)
        elif "refused" in result:
            self.refused[result["refused"]] += 1
        else:
            self.engines[result["engine"]] += 1
            self.right += result["right"]
            self.narrower += result["narrower"]
            self.wrong += result["wrong"]
            if result["wrong"]:
                self.wrong_files.append(name)
            self.compile_s.append(result["compile_s"])
            self.mask_us += result["mask_us"]

    def record(self) -> dict[str, Any]:
        """The score for the result file."""
        served = self.engines.total()
        return {
            "files": self.files,
            "served": served,
            "served_share": round(served / max(1, self.files), 4),
            "served_by": dict(self.engines),
            "instances_right": self.right,
            "narrower": self.narrower,
            "wrong": self.wrong,
            "wrong_files": self.wrong_files[:50],
            "cpu_s": round(self.cpu_s, 1),
            "compile_s": _quantiles(self.compile_s, 5),
            "mask_us": _quantiles(self.mask_us, 1),
            "failed": self.failed[:50],
            "refused": dict(self.refused.most_common(40)),
        }


def _quantiles(values: list[float], digits: int) -> dict[str, float]:
    ordered = sorted(values) or [0.0]
    at = {"p50": 0.5, "p99": 0.99, "max": 1.0}
    return {
        name: round(ordered[min(int(share * len(ordered)), len(ordered) - 1)], digits)
        for name, share in at.items()
    }


class Side:
    """One side's process."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.score = Score()
        self._context = multiprocessing.get_context("spawn")
        self._process: Any = None
        self._pipe: Any = None

    def run(self, path: Path) -> dict[str, Any] | None:
        """Score one file; None if the side crashed or took too long."""
        if self._process is None:
            self._pipe, theirs = self._context.Pipe()
            self._process = self._context.Process(target=_serve, args=(self.name, theirs))
            self._process.start()
            theirs.close()
            self._pipe.recv()
        result = None
        try:
            self._pipe.send(str(path))
            result = self._pipe.recv()
        except (EOFError, OSError):
            pass
        if result is None:
            self.stop()
        return result

    def stop(self) -> None:
        """End the process; the next file starts another one."""
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self._process = None


def _serve(name: str, pipe: Connection) -> None:
    sys.stderr.flush()
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # the engines log to it
    compile_schema = {"ours": _ours, "xgrammar": _stock_xgrammar, "llguidance": _stock_llguidance}[
        name
    ]()
    pipe.send("ready")
    while True:
        case = json.loads(Path(pipe.recv()).read_text())
        signal.setitimer(signal.ITIMER_PROF, LIMIT_S)  # ends the process: CPU time, not the clock's
        began = time.process_time()
        result = _score(compile_schema, case)
        pipe.send({**result, "cpu_s": round(time.process_time() - began, 4)})
        signal.setitimer(signal.ITIMER_PROF, 0)


def _score(compile_schema: Callable[[str], Compiled], case: dict[str, Any]) -> dict[str, Any]:
    text = json.dumps(case["schema"])
    began = time.thread_time()
    try:
        compiled = compile_schema(text)
    except (ValueError, RuntimeError, RecursionError) as error:
        return {"refused": _reason(error)}
    result: dict[str, Any] = {"engine": compiled.engine, "compile_s": time.thread_time() - began}
    counts: Counter[str] = Counter()
    mask_us: list[float] = []
    for instance in case["tests"]:
        written = json.dumps(instance["data"], ensure_ascii=False).encode("utf-8", "surrogatepass")
        if len(written) > MAX_INSTANCE_BYTES:
            continue
        accepted = _accepts(compiled, written, mask_us)
        if accepted:
            counts["right" if instance["valid"] else "wrong"] += 1
        else:
            counts["narrower" if instance["valid"] else "right"] += 1
    return {**result, "mask_us": mask_us, **{key: counts[key] for key in _COUNTS}}


_COUNTS = ("right", "narrower", "wrong")


def _accepts(compiled: Compiled, written: bytes, mask_us: list[float]) -> bool:
    accept, fill, is_complete = compiled.start()
    for byte in written:
        if len(mask_us) < MASKS_PER_SCHEMA:
            began = time.thread_time_ns()
            fill()
            mask_us.append((time.thread_time_ns() - began) / 1000)
        if not accept(byte):
            return False
    return is_complete()


def _reason(error: Exception) -> str:
    path = getattr(error, "path", None)
    problem = getattr(error, "problem", None) or str(error).strip().splitlines()[-1:] or [""]
    problem = problem if isinstance(problem, str) else problem[0]
    keys = [part for part in (path or "").split("/") if part and not part.isdecimal()]
    return f"{keys[-1][:30] if keys else ''}: {problem[:70]}"


def _setup() -> tuple[Any, Any]:
    from services.engine.grammar.vocabulary import model_tokenizer, vocabulary_of
    from services.engine.grammar.wire import Ready, Setup

    setup = Setup("", _SIZE, [_END], 1 << 30)
    return setup, Ready(vocabulary_of(model_tokenizer(""), _SIZE))


def _ours() -> Callable[[str], Compiled]:
    import xgrammar

    from services.engine.grammar.compiler_main import compile_schema, tokenizer_info
    from services.engine.grammar.schema_plan import LLGUIDANCE, plan_schema
    from services.engine.grammar.strict_engine import StrictCompiler

    setup, ready = _setup()
    strict = StrictCompiler(setup, ready)
    strict.load()
    compiler = xgrammar.GrammarCompiler(
        tokenizer_info(setup, ready), max_threads=1, cache_enabled=False
    )

    def make(text: str) -> Compiled:
        plan = plan_schema(text)
        if plan.backend == LLGUIDANCE:
            first = strict.start(strict.compile(plan.schema))
            return Compiled(plan.backend, _llguidance_start(first))
        return Compiled(plan.backend, _xgrammar_start(compile_schema(compiler, plan.schema)))

    return make


def _stock_xgrammar() -> Callable[[str], Compiled]:
    import xgrammar

    from services.engine.grammar.compiler_main import tokenizer_info

    info = tokenizer_info(*_setup())
    compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
    return lambda text: Compiled("xgrammar", _xgrammar_start(compiler.compile_json_schema(text)))


def _stock_llguidance() -> Callable[[str], Compiled]:
    from llguidance import LLMatcher

    from services.engine.grammar.strict_engine import StrictCompiler

    strict = StrictCompiler(*_setup())
    strict.load()

    def make(text: str) -> Compiled:
        first = strict.start(LLMatcher.grammar_from_json_schema(text))
        if first.is_error():
            raise ValueError(first.get_error())
        return Compiled("llguidance", _llguidance_start(first))

    return make


def _xgrammar_start(compiled: Any) -> Callable[[], Any]:
    import numpy as np
    import xgrammar

    words = np.zeros((1, -(-_SIZE // 32)), dtype=np.int32)

    def start() -> Any:
        matcher = xgrammar.GrammarMatcher(compiled)
        fill = matcher.fill_next_token_bitmask
        return matcher.accept_token, lambda: fill(words), lambda: matcher.accept_token(_END)

    return start


def _llguidance_start(first: Any) -> Callable[[], Any]:
    def start() -> Any:
        matcher = first.deep_copy()
        accept = matcher.try_consume_tokens
        return lambda byte: accept([byte]) == 1, matcher.compute_bitmask, matcher.is_accepting

    return start


def _files(args: argparse.Namespace) -> list[Path]:
    files = sorted(args.path.glob("*.json"))
    if not files:
        raise SystemExit(f"{args.path}: no .json files; give a folder of schemas with instances")
    random.Random(args.seed).shuffle(files)
    return files[: args.limit]


def _table(record: dict[str, Any]) -> Iterator[str]:
    yield "side        served           right  narrower  wrong  compile s p50/p99  mask µs p50/p99"
    for name, one in record["sides"].items():
        compile_s, mask = one["compile_s"], one["mask_us"]
        yield (
            f"{name:11} {one['served']:6} {one['served_share']:7.1%} {one['instances_right']:7}"
            f" {one['narrower']:9} {one['wrong']:6}"
            f"  {compile_s['p50']:8.4f} {compile_s['p99']:8.4f}"
            f"  {mask['p50']:6.1f} {mask['p99']:8.1f}"
        )


def _record(sides: list[Side], whole: int, seconds: float) -> dict[str, Any]:
    return {
        "benchmark": "bench_schemas",
        "date": date.today().isoformat(),
        "command": "python -m benchmarks.bench_schemas PATH",
        "machine": {"cpu": platform.processor() or platform.machine(), "cores": os.cpu_count()},
        "versions": {name: version(name) for name in ("xgrammar", "llguidance")},
        "vocabulary": "one token a byte",
        "files_in_folder": whole,
        "seconds": round(seconds, 1),
        "cpu_seconds": round(sum(side.score.cpu_s for side in sides), 1),
        "sides": {side.name: side.score.record() for side in sides},
    }


class Progress:
    """The results so far, kept in a file if one is given: a line for each file of the folder."""

    def __init__(self, path: Path | None) -> None:
        self.done: dict[str, dict[str, Any]] = {}
        self.seconds = 0.0
        self._path = path
        if path is not None and path.exists():
            for line in path.read_text().splitlines():
                self._enter(json.loads(line))

    def add(self, name: str, results: dict[str, Any], took_s: float) -> None:
        """Keep the results of one file, by side."""
        entry = {"file": name, "results": results, "took_s": round(took_s, 3)}
        self._enter(entry)
        if self._path is not None:
            with self._path.open("a") as kept:
                kept.write(json.dumps(entry) + "\n")

    def _enter(self, entry: dict[str, Any]) -> None:
        self.done[entry["file"]] = entry["results"]
        self.seconds += entry["took_s"]


def main() -> int:
    """Score a folder; 1 if our side accepted an invalid instance."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("path", type=Path, help="folder of schemas with instances")
    parser.add_argument("--output", type=Path, help="write DATE-schemas.json to this folder")
    parser.add_argument("--resume", type=Path, help="keep each result here and go on from it")
    parser.add_argument("--limit", type=int, help="score this many files, drawn at random")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    whole = len(list(args.path.glob("*.json")))
    files, sides, progress = _files(args), [Side(name) for name in SIDES], Progress(args.resume)
    try:
        for index, path in enumerate(files):
            if path.name not in progress.done:
                began = time.monotonic()
                results = {side.name: side.run(path) for side in sides}
                progress.add(path.name, results, time.monotonic() - began)
            for side in sides:
                side.score.add(path.name, progress.done[path.name][side.name])
            if index % 20 == 0:
                served = sides[0].score.engines.total() / (index + 1)
                print(f"\r{index + 1} of {len(files)}  {served:.1%} served", end="", flush=True)
    except KeyboardInterrupt:
        print("\ninterrupted; the result covers what was done", end="")
    finally:
        for side in sides:
            side.stop()
    record = _record(sides, whole, progress.seconds)
    print("\n" + "\n".join(_table(record)))
    _write(args, record)
    return 1 if sides[0].score.wrong else 0


def _write(args: argparse.Namespace, record: dict[str, Any]) -> None:
    if args.output is not None:
        path = args.output / f"{record['date']}-schemas.json"
        path.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
