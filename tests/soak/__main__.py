"""Sends thousands of requests of every kind through one engine process and reads what it holds.

    python -m tests.soak --requests 10000 --output benchmarks/results

A tiny random model, a real front, core and grammar compiler. Requests are plain, of several
choices, constrained, with log probabilities, with stop strings; they share prefixes, are cancelled,
have short deadlines or bad fields; blocks are scarce, so that they are preempted. Memory, threads
and descriptors are read while the engine is idle.
"""

import argparse
import asyncio
import contextlib
import json
import os
import platform
import random
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import grpc

from inferfleet_proto.internal.v1 import engine_pb2, engine_pb2_grpc
from inferfleet_proto.v1 import inference_pb2 as pb
from tests.doubles.tiny_model import write_tiny_model

KINDS = {
    "plain": 34,
    "choices": 10,
    "constrained": 10,
    "logprobs": 8,
    "stop string": 8,
    "long": 8,
    "cancelled": 10,
    "deadline": 7,
    "bad": 5,
}
CONSTRAINTS = 60
"""Different grammars: more than a small cache would keep for nothing, fewer than requests."""
_BASES = [[(7 * i * i + 13 * base + 5) % 250 for i in range(160)] for base in range(6)]
_FLAGS = {
    "block_size": 8,
    "num_blocks": 160,
    "max_model_len": 320,
    "max_num_seqs": 16,
    "max_num_batched_tokens": 64,
    "max_waiting": 64,
    "policy": "priority",
    "threads": 1,
    "grammar_timeout_s": 60,
}


@dataclass(frozen=True)
class State:
    """What an idle engine holds, per process by its place in the tree: front, core, compiler."""

    requests: int
    seconds: float
    rss_mib: list[float]
    threads: list[int]
    descriptors: list[int]
    held_blocks: int
    waiting: int
    running: int


@dataclass
class Soak:
    """One run: the requests, what became of them, and the states in between."""

    requests: int
    states: list[State] = field(default_factory=list)
    outcomes: Counter[str] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)
    cached_tokens: int = 0
    output_tokens: int = 0
    preemptions: int = 0


def make_request(number: int, kind: str, rng: random.Random) -> pb.GenerateRequest:
    """A request of a kind; all that is drawn comes from `rng`."""
    base = rng.choice(_BASES)
    ids = [*base[: rng.randrange(4, 60)], *(rng.randrange(250) for _ in range(rng.randrange(4)))]
    request = pb.GenerateRequest(model="tiny", request_id=f"soak-{number}")
    request.stop.max_tokens = rng.randrange(1, 24)
    request.sampling.temperature = rng.choice([0.0, 1.0])
    request.sampling.seed = number
    request.routing.priority = rng.choice([0, 0, 0, 1, 2])
    if kind == "choices":
        request.sampling.n = rng.randrange(2, 5)
        request.sampling.temperature = 1.0
    elif kind == "constrained":
        request.constraint.regex = f"[a-f]{{3,6}}-{rng.randrange(CONSTRAINTS)}"
        request.stop.max_tokens = 40
    elif kind == "logprobs":
        request.response.logprobs = request.response.prompt_logprobs = True
        request.response.top_logprobs = rng.randrange(4)
    elif kind == "stop string":
        request.stop.stop_strings.extend(["a", "of the", chr(rng.randrange(97, 123))])
        request.sampling.temperature = 1.0
    elif kind == "long":
        ids = [*base, *(rng.randrange(250) for _ in range(40))]
        request.stop.max_tokens = rng.randrange(20, 100)
    elif kind in ("cancelled", "deadline"):
        request.stop.max_tokens = 200
        request.stop.ignore_eos = True
    elif kind == "bad":
        ids = rng.choice([[], [10**6], [1] * 400])
    request.token_ids.ids.extend(ids)
    return request


async def soak(requests: int, *, points: list[int], at_once: int = 24, seed: int = 1) -> Soak:
    """Send so many requests, so many at once; the state is read after each of `points`."""
    result = Soak(requests)
    rng = random.Random(seed)
    kinds = rng.choices(list(KINDS), list(KINDS.values()), k=requests)
    with tempfile.TemporaryDirectory() as folder:
        async with _engine(Path(folder)) as (pid, ready):
            async with grpc.aio.insecure_channel(ready["address"]) as channel:
                stub = engine_pb2_grpc.EngineStub(channel)
                started, done = time.monotonic(), 0
                for point in points:
                    numbers = iter(range(done, point))
                    send = [_sender(stub, numbers, kinds, rng, result) for _ in range(at_once)]
                    await asyncio.gather(*send)
                    done = point
                    load = await _idle(stub)
                    state = _state(pid, done, time.monotonic() - started, load)
                    result.states.append(state)
                    print(state, file=sys.stderr, flush=True)
            result.preemptions = await asyncio.to_thread(_preemptions, ready["metrics_address"])
    return result


async def _sender(
    stub: engine_pb2_grpc.EngineStub,
    numbers: Iterator[int],
    kinds: list[str],
    rng: random.Random,
    result: Soak,
) -> None:
    for number in numbers:
        kind = kinds[number]
        result.kinds[kind] += 1
        result.outcomes[await _send(stub, make_request(number, kind, rng), kind, rng, result)] += 1


async def _send(
    stub: engine_pb2_grpc.EngineStub,
    request: pb.GenerateRequest,
    kind: str,
    rng: random.Random,
    result: Soak,
) -> str:
    """Its outcome: OK or a status name; raises if the stream is not of the contract's shape."""
    timeout = rng.choice([0.01, 0.05, 0.2]) if kind == "deadline" else None
    leave_after = rng.randrange(0, 12) if kind == "cancelled" else None
    call = stub.Run(engine_pb2.EngineRequest(request=request, tenant="t"), timeout=timeout)
    ended: list[int] = []
    try:
        while (event := await call.read()) is not grpc.aio.EOF:
            what = event.WhichOneof("event")
            result.cached_tokens += event.started.cached_tokens
            result.output_tokens += len(event.delta.token_ids)
            if what == "finished":
                ended.append(event.finished.choice)
            if leave_after is not None and leave_after <= 0:
                call.cancel()
                return "left"
            leave_after = None if leave_after is None else leave_after - 1
    except grpc.aio.AioRpcError as error:
        return str(error.code().name)
    wanted = list(range(request.sampling.n or 1))
    if sorted(ended) != wanted or what != "summary":
        raise AssertionError(f"{request.request_id}: choices {ended} ended, last was {what}")
    return "OK"


async def _idle(stub: engine_pb2_grpc.EngineStub) -> engine_pb2.LoadReport:
    call = stub.WatchLoad(engine_pb2.WatchLoadRequest())
    async with asyncio.timeout(120):
        while True:
            load = await call.read()
            if not (load.running_requests or load.waiting_requests or load.held_blocks):
                call.cancel()
                return load


@contextlib.asynccontextmanager
async def _engine(folder: Path) -> AsyncIterator[tuple[int, dict[str, str]]]:
    model = write_tiny_model(folder / "tiny")
    ready_file = folder / "ready.json"
    flags = [f"--{key.replace('_', '-')}={value}" for key, value in _FLAGS.items()]
    flags += [f"--model={model}", "--served-name=tiny", f"--ready-file={ready_file}"]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "services.engine", "--log-level=warning", *flags),
    )
    try:
        async with asyncio.timeout(300):
            while not ready_file.exists():
                if process.returncode is not None:
                    raise RuntimeError(f"the engine ended with status {process.returncode}")
                await asyncio.sleep(0.05)
        yield process.pid, json.loads(ready_file.read_text())
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


def _state(pid: int, requests: int, seconds: float, load: engine_pb2.LoadReport) -> State:
    pids = _tree(pid)
    return State(
        requests=requests,
        seconds=round(seconds, 1),
        rss_mib=[round(int(_status(p, "VmRSS").split()[0]) / 1024, 1) for p in pids],
        threads=[int(_status(p, "Threads")) for p in pids],
        descriptors=[len(os.listdir(f"/proc/{p}/fd")) for p in pids],
        held_blocks=load.held_blocks,
        waiting=load.waiting_requests,
        running=load.running_requests,
    )


def _tree(pid: int) -> list[int]:
    """A process and its descendants, parents first, in the order of their start."""
    found = [pid]
    for task in os.listdir(f"/proc/{pid}/task"):
        children = Path(f"/proc/{pid}/task/{task}/children").read_text().split()
        for child in map(int, children):
            found += _tree(child)
    return found


def _status(pid: int, name: str) -> str:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(line.split(":", 1)[1].strip() for line in lines if line.startswith(f"{name}:"))


def _preemptions(address: str) -> int:
    with urllib.request.urlopen(f"http://{address}/metrics") as answer:
        lines = answer.read().decode().splitlines()
    name = "inferfleet_engine_preemptions_total "
    return int(float(next(line for line in lines if line.startswith(name)).split()[1]))


def points_of(requests: int) -> list[int]:
    """A tenth, a half, all."""
    return [requests // 10, requests // 2, requests]


def main() -> None:
    """Print the states; with --output also write a dated JSON file."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.soak",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--at-once", type=int, default=24)
    parser.add_argument("--output", type=Path, help="folder for the JSON file")
    options = parser.parse_args()
    load_before = os.getloadavg()[0]
    result = asyncio.run(
        soak(options.requests, points=points_of(options.requests), at_once=options.at_once)
    )
    date = datetime.now(UTC).isoformat(timespec="seconds")
    record = {
        "benchmark": "soak",
        "date": date,
        "command": "python -m tests.soak " + " ".join(sys.argv[1:]),
        "engine": _FLAGS,
        "python": platform.python_version(),
        "torch": version("torch"),
        "grpcio": version("grpcio"),
        "load_average": [load_before, os.getloadavg()[0]],
        "processes": ["front", "core", "grammar compiler"],
        **{name: value for name, value in vars(result).items() if name != "states"},
        "states": [vars(state) for state in result.states],
    }
    print(json.dumps(record, indent=1))
    if options.output:
        path = options.output / f"{date[:10]}-soak.json"
        path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
