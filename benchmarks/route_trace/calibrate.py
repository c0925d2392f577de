"""Compares the simulator with a real fleet of two engines on one small trace.

    python -m benchmarks.route_trace.calibrate --json out.json

Starts a fleet (two engines of one thread each, with the default model), measures how fast
they prefill and decode with both busy, replays a generated trace through the gateway with every
block of 512 tokens made 32 real ones, measures again, then simulates the same requests with the
mean of the measured rates, 21 times. Prints time to first token, latency and hit rate of both.
Needs an otherwise idle machine. It warns if the two measurements differ by more than a tenth; the
ratios are meaningless then.
"""

import argparse
import asyncio
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from random import Random
from statistics import mean, median, quantiles
from typing import Any

from benchmarks.route_trace.engine import Rates
from benchmarks.route_trace.fleet import Fleet, at_rate, replay
from benchmarks.route_trace.trace import BLOCK_SIZE, Request, generate
from inferfleet import AsyncClient
from inferfleet.results import Delta, Started
from services.balancer.engines.engine_view import CostModel

REAL_BLOCK = 32
SCALE = BLOCK_SIZE // REAL_BLOCK
LOWEST_ID, NUM_IDS = 1000, 29_000
"""Ids of ordinary text in SmolLM2's vocabulary, and in every other worth serving."""
ROUND_TOKENS, MAX_NUM_SEQS = 512, 64
QUIET = 0.1
SIMULATIONS, SHAKEN_S = 21, 0.05
COMPARED = {
    "real": "seen by a client of the gateway, behind it balancer (least_time), index and engines",
    "simulated": "the same requests, the same policy, engines of `speed`: medians of 21 runs whose "
    "arrivals differ by up to 50 ms",
    "ratio": "simulated / real; means nothing unless `quiet`: speed held during the replay",
}


@dataclass(frozen=True)
class Measured:
    """One request, simulated or real."""

    ttft_s: float
    latency_s: float
    cached_tokens: int
    prompt_tokens: int


@dataclass(frozen=True)
class Speed:
    """What the engines can do, seen by a client while all are busy."""

    prefill_tokens_per_s: float
    overhead_s: float
    """Cost of a request that does not depend on its length."""
    decode_base_s: float
    decode_per_seq_s: float


def small_trace(count: int, seed: int, max_blocks: int, max_output: int) -> list[Request]:
    """Requests that a small model can serve, in the simulator's blocks of 512 tokens."""
    fitting = [r for r in generate(count * 3, seed) if r.input_length < max_blocks * BLOCK_SIZE]
    if len(fitting) < count:
        raise ValueError(f"only {len(fitting)} of the generated requests fit")
    return [
        replace(r, number=n, output_length=min(max(r.output_length // 4, 4), max_output))
        for n, r in enumerate(fitting[:count])
    ]


def token_ids(request: Request) -> list[int]:
    """The prompt in real tokens: equal blocks are equal tokens, the rest is the request's own."""
    ids = [
        LOWEST_ID + (int.from_bytes(block[:4], "big") + at * 7919) % NUM_IDS
        for block in request.chain
        for at in range(REAL_BLOCK)
    ]
    own = max((request.input_length - len(request.chain) * BLOCK_SIZE) // SCALE, 1)
    return ids + [LOWEST_ID + (request.number * 31 + at * 17) % NUM_IDS for at in range(own)]


async def ask(client: AsyncClient, ids: Sequence[int], output: int) -> tuple[Measured, float]:
    """One request; also the mean seconds between its tokens."""
    began, first, last, tokens, cached = time.monotonic(), 0.0, 0.0, 0, 0
    call = await client.generate(
        token_ids=list(ids), max_tokens=output, temperature=0, ignore_eos=True
    )
    async for event in call:
        if isinstance(event, Started):
            cached = event.cached_tokens
        elif isinstance(event, Delta) and event.token_ids:
            last = time.monotonic()
            first = first or last
            tokens += len(event.token_ids)
    gap_s = (last - first) / (tokens - 1) if tokens > 1 else 0.0
    return Measured(first - began, time.monotonic() - began, cached, len(ids)), gap_s


async def measure_speed(client: AsyncClient, engines: int) -> Speed:
    """Prefill by two lengths, decode by two batch sizes, with every engine busy."""
    fresh = iter(range(10**6))

    def prompt(length: int) -> list[int]:
        seed = next(fresh)
        return [LOWEST_ID + (seed * 7907 + at * 101 + at * at) % NUM_IDS for at in range(length)]

    async def together(count: int, length: int, output: int) -> list[tuple[Measured, float]]:
        return await asyncio.gather(*(ask(client, prompt(length), output) for _ in range(count)))

    await together(2 * engines, 64, 8)  # first-use costs
    short, long = 128, 1024
    ttft = {}
    for length in (short, long):
        seen = [m.ttft_s for _ in range(4) for m, _ in await together(engines, length, 1)]
        ttft[length] = median(seen)
    per_token_s = max(ttft[long] - ttft[short], 1e-6) / (long - short)
    few, many = 1, 8
    gaps = {}
    for batch in (few, many):
        seen = [gap for _ in range(2) for _, gap in await together(batch * engines, 32, 48)]
        gaps[batch] = median(seen)
    per_seq_s = max(gaps[many] - gaps[few], 0.0) / (many - few)
    return Speed(
        prefill_tokens_per_s=1 / per_token_s,
        overhead_s=max(ttft[short] - short * per_token_s, 0.0),
        decode_base_s=max(gaps[few] - per_seq_s, 1e-4),
        decode_per_seq_s=per_seq_s,
    )


def between(before: Speed, after: Speed) -> Speed:
    """The mean of the seconds that things took before and after a replay."""
    per_token_s = (1 / before.prefill_tokens_per_s + 1 / after.prefill_tokens_per_s) / 2
    return Speed(
        prefill_tokens_per_s=1 / per_token_s,
        overhead_s=(before.overhead_s + after.overhead_s) / 2,
        decode_base_s=(before.decode_base_s + after.decode_base_s) / 2,
        decode_per_seq_s=(before.decode_per_seq_s + after.decode_per_seq_s) / 2,
    )


def drift(before: Speed, after: Speed) -> dict[str, float]:
    """After / before, of a prompt's token and of a token of one sequence: 1 on a quiet machine."""
    return {
        "prefill": before.prefill_tokens_per_s / after.prefill_tokens_per_s,
        "decode": (after.decode_base_s + after.decode_per_seq_s)
        / (before.decode_base_s + before.decode_per_seq_s),
    }


async def replay_real(client: AsyncClient, trace: Sequence[Request]) -> list[Measured]:
    """Each request at its time."""
    began = time.monotonic()

    async def one(request: Request) -> Measured:
        await asyncio.sleep(max(began + request.arrival_s - time.monotonic(), 0))
        measured, _ = await ask(client, token_ids(request), request.output_length)
        return measured

    return await asyncio.gather(*(one(request) for request in trace))


def simulate(trace: Sequence[Request], speed: Speed, engines: int, blocks: int) -> list[Measured]:
    """The same requests on simulated engines of the measured speed."""
    rates = Rates(
        prefill_tokens_per_s=speed.prefill_tokens_per_s * SCALE,
        decode_base_s=speed.decode_base_s,
        decode_per_seq_s=speed.decode_per_seq_s,
        round_tokens=ROUND_TOKENS * SCALE,
        max_num_seqs=MAX_NUM_SEQS,
        num_blocks=blocks,
    )
    lengths = {request.number: request.input_length for request in trace}
    ended = replay(trace, Fleet(engines, rates, "least_time", 0, CostModel()))
    return [
        Measured(
            f.first_token_s - f.arrival_s + speed.overhead_s,
            f.end_s - f.arrival_s + speed.overhead_s,
            f.hit_tokens // SCALE,
            lengths[f.number] // SCALE,
        )
        for f in ended
    ]


def simulate_often(
    trace: Sequence[Request], speed: Speed, engines: int, blocks: int, seed: int
) -> dict[str, float]:
    """Medians of the figures of `SIMULATIONS` runs whose arrivals differ by up to `SHAKEN_S`.

    One choice that falls otherwise moves much of what follows: a single run is a single draw, and
    its 90th percentile of 60 requests was seen to differ by a quarter from another's.
    """
    rng, runs = Random(seed), []
    for _ in range(SIMULATIONS):
        moved = [replace(r, arrival_s=r.arrival_s + rng.uniform(0, SHAKEN_S)) for r in trace]
        moved.sort(key=lambda r: r.arrival_s)
        runs.append(figures(simulate(moved, speed, engines, blocks)))
    return {name: median(run[name] for run in runs) for name in runs[0]}


def figures(measured: Sequence[Measured]) -> dict[str, float]:
    """What is compared."""
    ttft, latency = ([getattr(m, name) for m in measured] for name in ("ttft_s", "latency_s"))
    return {
        "ttft_mean_s": mean(ttft),
        "ttft_p50_s": median(ttft),
        "ttft_p90_s": quantiles(ttft, n=10)[8],
        "latency_mean_s": mean(latency),
        "latency_p90_s": quantiles(latency, n=10)[8],
        "hit_rate": sum(m.cached_tokens for m in measured) / sum(m.prompt_tokens for m in measured),
    }


async def run(args: argparse.Namespace, address: str) -> dict[str, Any]:
    """Measure, replay, simulate."""
    async with AsyncClient(address) as client:
        before = speed = await measure_speed(client, args.engines)
        print(f"measured: {speed}", flush=True)
        trace = small_trace(args.requests, args.seed, args.max_blocks, args.max_output)
        uncached = mean(r.input_length for r in trace) / SCALE / 2  # about half of it hits
        output = mean(r.output_length for r in trace)
        busy_s = uncached / speed.prefill_tokens_per_s + output * (
            speed.decode_per_seq_s + speed.decode_base_s / 4
        )
        rate = args.load * args.engines / busy_s
        trace = at_rate(trace, rate)
        print(f"replaying {len(trace)} requests, {rate:.2f} a second", flush=True)
        real = figures(await replay_real(client, trace))
        after = await measure_speed(client, args.engines)
    speed, drifted = between(before, after), drift(before, after)
    print(f"measured again, after / before: {drifted}", flush=True)
    simulated = simulate_often(trace, speed, args.engines, args.blocks, args.seed)
    return {
        "compared": COMPARED,
        "speed": asdict(speed),
        "speed_before": asdict(before),
        "speed_after": asdict(after),
        "drift": drifted,
        "quiet": all(abs(by - 1) <= QUIET for by in drifted.values()),
        "requests_per_s": rate,
        "real": real,
        "simulated": simulated,
        "ratio": {name: simulated[name] / real[name] if real[name] else 0.0 for name in real},
    }


def up(args: argparse.Namespace, state_dir: str) -> str:
    """Start a fleet on free ports; its gateway's address, once it serves.

    Raises:
        RuntimeError: it did not start.
    """
    keys = {
        "engine.num_blocks": args.blocks,
        "engine.block_size": REAL_BLOCK,
        "engine.threads": 1,
        "engine.max_num_batched_tokens": ROUND_TOKENS,
        "engine.max_num_seqs": MAX_NUM_SEQS,
        # Beside other work a round may take longer than an engine that is well ever should.
        "balancer.stall_limit_s": 60,
    }
    if args.simulate:
        keys["engine.simulate"] = args.simulate
    command = [sys.executable, "-m", "inferfleet_cli.main", "up", "--state-dir", state_dir]
    command += ["--engines", str(args.engines), "--port", "0", "--http-port", "0"]
    command += ["--dtype", args.dtype, "--end-with", str(os.getpid())]
    command += [part for key, value in keys.items() for part in ("--set", f"{key}={value}")]
    command += ["--detach"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    if ended.returncode:
        raise RuntimeError(f"the fleet did not start: {ended.stdout}{ended.stderr}")
    return str(json.loads((Path(state_dir) / "fleet.json").read_text())["gateway"])


def main() -> None:
    """Run, print, write."""
    args = arguments()
    load_before = os.getloadavg()
    with tempfile.TemporaryDirectory() as state_dir:
        address = up(args, state_dir)
        try:
            result = asyncio.run(run(args, address))
        finally:
            command = [sys.executable, "-m", "inferfleet_cli.main", "down"]
            subprocess.run([*command, "--state-dir", state_dir], check=False, timeout=120)
    print(f"{'':<16} {'real':>9} {'simulated':>9} {'ratio':>6}")
    for name, real in result["real"].items():
        simulated, ratio = result["simulated"][name], result["ratio"][name]
        print(f"{name:<16} {real:9.3f} {simulated:9.3f} {ratio:6.2f}")
    if not result["quiet"]:
        print("the machine was not quiet: its speed changed during the replay, run it again")
    if args.json is not None:
        written = {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "command": "python -m benchmarks.route_trace.calibrate " + " ".join(sys.argv[1:]),
            "machine": {
                "cpus": os.cpu_count(),
                "load_before": load_before,
                "load_after": os.getloadavg(),
                "system": platform.platform(),
            },
            "versions": {name: version(name) for name in ("grpcio", "torch")}
            | {"python": platform.python_version()},
            "arguments": {k: v for k, v in vars(args).items() if k != "json"},
            **result,
        }
        args.json.write_text(json.dumps(written, indent=1) + "\n")


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.route_trace.calibrate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--requests", type=int, default=160)
    parser.add_argument("--engines", type=int, default=2)
    parser.add_argument("--load", type=float, default=0.5, help="share of what they can do, about")
    parser.add_argument("--blocks", type=int, default=256, help="of 32 tokens, each engine")
    parser.add_argument("--max-blocks", type=int, default=40, help="longest prompt")
    parser.add_argument("--max-output", type=int, default=24, help="tokens")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--simulate", default="", help="the engines' own key, for a quick look")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write all figures there")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
