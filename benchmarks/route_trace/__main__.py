"""Every routing policy on one trace at several loads, on simulated engines and a virtual clock.

    python -m benchmarks.route_trace --json out.json --svg out.svg
    python -m benchmarks.route_trace --trace requests.jsonl --policies least_time,prefix_only

Prints for each: share of prompt tokens that were in the cache (beside one pooled LRU of the same
total size), TTFT, busy seconds of the busiest engine over the mean, and decisions per second.
"""

import argparse
import json
import platform
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path

from benchmarks.route_trace.engine import Rates
from benchmarks.route_trace.fleet import (
    Fleet,
    Result,
    as_json,
    at_rate,
    pooled_hit_rate,
    replay,
    saturation,
    summarise,
)
from benchmarks.route_trace.plot import svg
from benchmarks.route_trace.trace import Request, generate, load
from services.balancer.engines.engine_view import CostModel
from services.balancer.routing.policies import POLICIES

HEADER = (
    f"{'load':>5} {'policy':<14} {'hit':>6} {'of pool':>7} {'TTFT p50':>9} {'p90':>8} {'p99':>8}"
    f" {'imbalance':>9} {'decisions/s':>11}"
)


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.route_trace",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--trace", type=Path, help="JSON lines; default: a generated trace")
    parser.add_argument("--requests", type=int, help="the first so many (generated: 4000)")
    parser.add_argument("--seed", type=int, default=0, help="of the trace and of chance")
    parser.add_argument("--engines", type=int, default=16)
    parser.add_argument("--loads", default="0.5,0.8,0.95", help="shares of measured saturation")
    parser.add_argument("--policies", default=",".join(POLICIES), help="default: all")
    parser.add_argument(
        "--window",
        type=int,
        default=8,
        help="requests an engine holds while saturation is measured",
    )
    parser.add_argument("--blocks", type=int, default=Rates.num_blocks, help="of 512 tokens, each")
    parser.add_argument(
        "--prefill", type=float, default=Rates.prefill_tokens_per_s, help="tokens/s"
    )
    parser.add_argument("--decode-base", type=float, default=Rates.decode_base_s, help="seconds")
    parser.add_argument("--decode-seq", type=float, default=Rates.decode_per_seq_s, help="seconds")
    parser.add_argument("--json", type=Path, help="write all figures there")
    parser.add_argument("--svg", type=Path, help="draw them there")
    args = parser.parse_args(argv)
    args.policies = args.policies.split(",")
    unknown = [name for name in args.policies if name not in POLICIES]
    if unknown:
        parser.error(f"--policies: {unknown[0]!r} is none of {', '.join(POLICIES)}")
    try:
        args.loads = [float(part) for part in args.loads.split(",")]
    except ValueError:
        parser.error(f"--loads: {args.loads!r} is not a comma list of numbers")
    counts = ("engines", "window", "blocks", "prefill", "decode_base", "decode_seq")
    if min(args.loads) <= 0 or any(getattr(args, name) <= 0 for name in counts):
        parser.error(f"--loads, --{', --'.join(counts).replace('_', '-')}: must be above 0")
    if args.requests is not None and args.requests < 2:
        parser.error("--requests: must be at least 2")
    return args


@dataclass(frozen=True)
class Figures:
    """All that a run found."""

    rates: Rates
    pooled: float
    """Hit rate of one LRU cache as large as all engines' together."""
    saturation: float
    """Requests a second."""
    results: list[Result]


def run(args: argparse.Namespace, trace: Sequence[Request]) -> Figures:
    """All figures; prints rows as they come."""
    rates = Rates(
        prefill_tokens_per_s=args.prefill,
        decode_base_s=args.decode_base,
        decode_per_seq_s=args.decode_seq,
        num_blocks=args.blocks,
    )

    def fleet(policy: str) -> Fleet:
        return Fleet(args.engines, rates, policy, args.seed, CostModel())

    pooled = pooled_hit_rate(trace, rates.num_blocks * args.engines)
    most = saturation(trace, fleet("least_time"), args.window)
    print(
        f"{len(trace)} requests over {args.engines} simulated engines; saturation {most:.2f} "
        f"requests/s; one pooled LRU hits {pooled:.3f}\n{HEADER}"
    )
    results: list[Result] = []
    for share in args.loads:
        stretched = at_rate(trace, most * share)
        for policy in args.policies:
            engines = fleet(policy)
            ended = replay(stretched, engines)
            results.append(summarise(policy, share, stretched, engines, ended))
            print(row(results[-1], pooled), flush=True)
    return Figures(rates, pooled, most, results)


def row(result: Result, pooled: float) -> str:
    """One line of the table."""
    r = result
    return (
        f"{r.load:5g} {r.policy:<14} {r.hit_rate:6.3f} {r.hit_rate / (pooled or 1):7.3f}"
        f" {r.ttft_p50_s:8.3f}s {r.ttft_p90_s:7.2f}s {r.ttft_p99_s:7.2f}s"
        f" {r.imbalance:9.3f} {r.decisions_per_s:11.0f}"
    )


def main() -> None:
    """Run, print, write."""
    args = arguments()
    try:
        if args.trace is None:
            trace = generate(args.requests or 4000, args.seed)
        else:
            trace = load(args.trace, args.requests)
        figures = run(args, trace)
    except (OSError, ValueError) as error:
        sys.exit(f"route_trace: {error}")
    results, pooled = figures.results, figures.pooled
    if args.json is not None:
        record = {
            "date": date.today().isoformat(),
            "machine": f"{platform.machine()}, Python {platform.python_version()}",
            "trace": "generated" if args.trace is None else "file",
            "requests": len(trace),
            "seed": args.seed,
            "engines": args.engines,
            "rates": asdict(figures.rates),
            "saturation_requests_per_s": round(figures.saturation, 3),
            "pooled_lru_hit_rate": round(pooled, 4),
            "results": [as_json(result) for result in results],
        }
        args.json.write_text(json.dumps(record, indent=1) + "\n")
    if args.svg is not None:
        kind = "generated trace" if args.trace is None else "trace file"
        args.svg.write_text(
            svg(results, pooled, f"{len(trace)} requests of a {kind}, {args.engines} engines")
        )


if __name__ == "__main__":
    main()
