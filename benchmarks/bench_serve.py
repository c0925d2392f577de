"""A served fleet under load: tokens per second, time to first token, gaps between tokens.

    python -m benchmarks.bench_serve                                  # what `make up` started
    python -m benchmarks.bench_serve --http http://127.0.0.1:8000/v1  # an OpenAI-compatible server

The same client and the same prompts (random token ids, never the same twice unless --prefix-len
says so) measure ours and a peer, so that both can be run one after the other on one machine. A
level of concurrency keeps that many requests open until all of its requests are answered. The
client takes its part of the cores; at high rates it is a part of what is measured.
"""

import argparse
import asyncio
import json
import os
import platform
import random
import sys
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from statistics import quantiles

import httpx

from inferfleet import AsyncClient
from inferfleet.errors import InferfleetError
from inferfleet.results import Delta

LOWEST_ID, HIGHEST_ID = 1000, 30_000
"""Ids of ordinary text in every vocabulary worth serving."""


@dataclass
class Record:
    """One request: seconds since its start at which tokens came, and how many."""

    moments: list[tuple[float, int]] = field(default_factory=list)
    problem: str | None = None

    @property
    def tokens(self) -> int:
        return sum(count for _, count in self.moments)

    @property
    def gaps(self) -> list[float]:
        """Seconds per token between deltas: a delta of k tokens counts k equal gaps."""
        pairs = zip(self.moments, self.moments[1:], strict=False)
        return [(t1 - t0) / n for (t0, _), (t1, n) in pairs for _ in range(n)]


@dataclass(frozen=True)
class Level:
    """One line of the table; times in seconds."""

    concurrency: int
    requests: int
    failed: int
    seconds: float
    output_tokens: int
    tokens_per_s: float
    ttft_p50: float
    ttft_p90: float
    ttft_p99: float
    itl_p50: float
    itl_p99: float


class GrpcTarget:
    """The fleet's own face."""

    def __init__(self, address: str, model: str | None) -> None:
        self.name = f"grpc://{address}"
        self._client = AsyncClient(address)
        self._model = model

    async def stream(self, ids: list[int], length: int) -> AsyncIterator[int]:
        call = await self._client.generate(
            token_ids=ids, model=self._model, max_tokens=length, temperature=0, ignore_eos=True
        )
        async for event in call:
            if isinstance(event, Delta) and event.token_ids:
                yield len(event.token_ids)

    async def close(self) -> None:
        await self._client.close()


class HttpTarget:
    """Any server with OpenAI's /completions; it must take token ids and `ignore_eos`."""

    def __init__(self, base: str, model: str | None) -> None:
        self.name = base
        self._client = httpx.AsyncClient(base_url=base, timeout=600)
        self._model = model

    async def stream(self, ids: list[int], length: int) -> AsyncIterator[int]:
        body = {
            "model": self._model or await self._first_model(),
            "prompt": ids,
            "max_tokens": length,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
        async with self._client.stream("POST", "/completions", json=body) as answer:
            if answer.status_code != 200:
                raise RuntimeError((await answer.aread()).decode()[:200])
            async for line in answer.aiter_lines():
                if line.startswith("data: {") and json.loads(line[6:]).get("choices"):
                    yield 1

    async def close(self) -> None:
        await self._client.aclose()

    async def _first_model(self) -> str:
        models = (await self._client.get("/models")).json()["data"]
        self._model = str(models[0]["id"])
        return self._model


Target = GrpcTarget | HttpTarget


async def measure(target: Target, options: argparse.Namespace, concurrency: int) -> Level:
    """Run one level."""
    count = options.requests or max(4, 2 * concurrency)
    draw = random.Random(f"{options.seed}/{concurrency}")
    prefix = _ids(random.Random(options.seed), options.prefix_len)
    prompts = [prefix + _ids(draw, options.input_len - len(prefix)) for _ in range(count)]
    show = _progress(f"concurrency {concurrency}", count)
    records: list[Record] = []

    async def worker() -> None:
        while prompts:
            records.append(await _one(target, prompts.pop(), options.output_len))
            show(len(records))

    started = time.perf_counter()
    await asyncio.gather(*(worker() for _ in range(concurrency)))
    return _level(concurrency, records, time.perf_counter() - started)


async def _one(target: Target, ids: list[int], length: int) -> Record:
    record, started = Record(), time.perf_counter()
    try:
        async for count in target.stream(ids, length):
            record.moments.append((time.perf_counter() - started, count))
    except (InferfleetError, httpx.HTTPError, RuntimeError) as error:
        record.problem = f"{type(error).__name__}: {error}"
    if not record.moments and record.problem is None:
        record.problem = "no tokens"
    return record


def _level(concurrency: int, records: list[Record], seconds: float) -> Level:
    good = [record for record in records if record.problem is None]
    for problem in sorted({record.problem for record in records if record.problem})[:3]:
        print(f"  failed: {problem}", file=sys.stderr)
    firsts = [record.moments[0][0] for record in good]
    gaps = [gap for record in good for gap in record.gaps]
    tokens = sum(record.tokens for record in good)
    return Level(
        concurrency=concurrency,
        requests=len(records),
        failed=len(records) - len(good),
        seconds=round(seconds, 3),
        output_tokens=tokens,
        tokens_per_s=round(tokens / seconds, 1),
        ttft_p50=_at(firsts, 50),
        ttft_p90=_at(firsts, 90),
        ttft_p99=_at(firsts, 99),
        itl_p50=_at(gaps, 50),
        itl_p99=_at(gaps, 99),
    )


def _at(values: list[float], percent: int) -> float:
    if len(values) < 2:
        return round(values[0], 4) if values else float("nan")
    return round(quantiles(values, n=100, method="inclusive")[percent - 1], 4)


def _ids(draw: random.Random, count: int) -> list[int]:
    return [draw.randint(LOWEST_ID, HIGHEST_ID) for _ in range(count)]


def _progress(label: str, total: int) -> Callable[[int], None]:
    width = 30

    def show(done: int) -> None:
        if not sys.stderr.isatty():
            return
        bar = "█" * (width * done // total)
        end = "\n" if done == total else ""
        print(
            f"\r{label:<16} |{bar:<{width}}| {done}/{total}", end=end, file=sys.stderr, flush=True
        )

    show(0)
    return show


def table(levels: list[Level]) -> str:
    """For people; milliseconds."""
    head = "conc  req  fail  tokens/s  TTFT p50    p90    p99 ms   ITL p50    p99 ms"
    rows = [
        f"{v.concurrency:>4} {v.requests:>4} {v.failed:>5} {v.tokens_per_s:>9.1f} "
        f"{v.ttft_p50 * 1e3:>9.0f} {v.ttft_p90 * 1e3:>6.0f} {v.ttft_p99 * 1e3:>6.0f} "
        f"{v.itl_p50 * 1e3:>12.1f} {v.itl_p99 * 1e3:>6.1f}"
        for v in levels
    ]
    return "\n".join([head, *rows])


async def run(options: argparse.Namespace) -> int:
    """All levels, a table, and a file on request; 1 if a request failed."""
    model = options.model or None
    target: Target = (
        HttpTarget(options.http, model) if options.http else GrpcTarget(options.address, model)
    )
    try:
        await _one(target, _ids(random.Random(0), 16), 4)  # connections and first-use costs
        levels = [await measure(target, options, level) for level in options.concurrency]
    finally:
        await target.close()
    print(f"{target.name}: {options.input_len} tokens in, {options.output_len} out")
    print(table(levels))
    if options.output:
        write(options, target, levels)
    return int(any(level.failed for level in levels))


def write(options: argparse.Namespace, target: Target, levels: list[Level]) -> None:
    """A dated JSON file with all that is needed to repeat the run."""
    record = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": "python -m benchmarks.bench_serve " + " ".join(sys.argv[1:]),
        "target": target.name,
        "note": options.note,
        "machine": {"cpus": os.cpu_count(), "load": os.getloadavg(), "system": platform.platform()},
        "versions": {"python": platform.python_version(), "grpcio": version("grpcio")},
        "levels": [asdict(level) for level in levels],
    }
    options.output.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(f"written to {options.output}")


def parse() -> argparse.Namespace:
    """Flags."""
    parser = argparse.ArgumentParser(
        prog="benchmarks.bench_serve",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--address", default="127.0.0.1:50051", help="gRPC; default %(default)s")
    parser.add_argument("--http", metavar="BASE", help="measure this /v1 base URL instead")
    parser.add_argument("--model", help="default: the first that is listed")
    parser.add_argument(
        "--concurrency",
        type=lambda text: [int(part) for part in text.split(",")],
        default=[1, 8],
        help="levels, separated by commas; default 1,8",
    )
    parser.add_argument("--requests", type=int, default=0, help="per level; default 2 × level, ≥ 4")
    parser.add_argument("--input-len", type=int, default=128, help="tokens; default %(default)s")
    parser.add_argument("--output-len", type=int, default=128, help="tokens; default %(default)s")
    parser.add_argument("--prefix-len", type=int, default=0, help="of these, equal in all prompts")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--note", default="", help="kept in the file: dtype, threads, peer version")
    parser.add_argument("--output", type=Path, help="write JSON there")
    options = parser.parse_args()
    if not 0 <= options.prefix_len < options.input_len:
        parser.error("--prefix-len must be below --input-len")
    return options


if __name__ == "__main__":
    raise SystemExit(asyncio.run(run(parse())))
