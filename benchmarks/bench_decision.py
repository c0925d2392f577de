"""What one routing decision costs the balancer, without the Match call.

    python -m benchmarks.bench_decision --engines 16 --rate 500 --requests 5000
    python -m benchmarks.bench_decision --profile

Each request is parsed, admitted, hashed, decided, written down and dispatched as the balancer does
it, with requests in flight at every engine and their prefixes held. Prints p50 and p95 in
microseconds per part; with --rate, requests come that often and "late" is how long one waited for
those before it. --profile shows where the time goes.
"""

import argparse
import asyncio
import cProfile
import json
import os
import platform
import pstats
import time
from random import Random
from statistics import quantiles

import grpc

from inferfleet_proto.internal.v1 import engine_pb2
from inferfleet_proto.v1 import inference_pb2
from services.balancer.engines.breaker import Breaker
from services.balancer.engines.engine_view import CostModel
from services.balancer.engines.member import Member, Outcome
from services.balancer.queue.admission import Admission
from services.balancer.request.incoming import parse, routing_request
from services.balancer.routing.decision_ledger import DecisionLedger
from services.balancer.routing.policies import POLICIES
from services.balancer.routing.prefix_holds import PrefixHolds
from services.balancer.routing.prefix_match import Matches
from services.balancer.routing.router import Router
from services.common import block_hash


def make_members(count, rng):
    """Engines with reports and a few requests in flight each."""
    members = []
    for number in range(count):
        info = engine_pb2.EngineInfo(
            engine_id=f"engine-{number}",
            epoch_ms=1,
            model="m",
            hash_namespace=b"n" * 32,
            block_size=32,
            max_num_seqs=64,
            numerics_id="x",
        )
        channel: grpc.aio.Channel = None
        member = Member(info, channel, Breaker(), stall_limit_s=1e9, clock=time.monotonic)
        member.apply_report(
            engine_pb2.LoadReport(
                running_requests=rng.randrange(30),
                uncached_tokens_queued=rng.randrange(4000),
                held_blocks=rng.randrange(900),
                total_blocks=1000,
                prefill_tokens_per_s=900,
                decode_round_s=0.05,
            )
        )
        for _ in range(8):
            member.dispatch(uncached_tokens=500, blocks=20)
        members.append(member)
    return members


async def measure(args):
    """Seconds per request for each part."""
    rng = Random(0)
    members = {m.info.engine_id: m for m in make_members(args.engines, rng)}

    def views(model):
        now = time.monotonic()
        return [member.view(now) for member in members.values()]

    admission = Admission(views, queue_size=100, headroom=4, patience_s=1)
    router = Router(args.policy, views, admission.has_free_slots, cost=CostModel(), rng=rng)
    ledger, holds = DecisionLedger(2048), PrefixHolds()
    raw = engine_pb2.EngineRequest(
        request=inference_pb2.GenerateRequest(
            model="m",
            request_id="r",
            token_ids=inference_pb2.TokenIds(ids=range(args.prompt_tokens)),
        )
    ).SerializeToString()
    _hold_others(holds, args, rng)
    names = ("late", "parse", "admit", "hash", "decide")
    parts: dict[str, list[float]] = {name: [] for name in names}
    began = time.perf_counter()
    for number in range(args.requests):
        due = began + number / args.rate if args.rate else time.perf_counter()
        if (early := due - time.perf_counter()) > 0:
            await asyncio.sleep(early)
        parts["late"].append(max(time.perf_counter() - due, 0.0))
        marks = [time.perf_counter()]
        request = routing_request(parse(raw).request)
        marks.append(time.perf_counter())
        slot = await admission.enter(request, None)
        marks.append(time.perf_counter())
        root = block_hash.root(b"n" * 32, b"")
        chain = block_hash.join_for_index(block_hash.hash_blocks(root, request.token_ids, 32))
        marks.append(time.perf_counter())
        known = {(f"engine-{number % args.engines}", 1): 512}
        matches = Matches(True, known, {(b"n" * 32, 32): chain}, holds)
        routing = router.choose(request, router.eligible(request), matches)
        ledger.add(
            f"r{number}",
            "trace",
            0,
            router.policy_name,
            routing,
            prompt_tokens=args.prompt_tokens,
            match_known=True,
        )
        engine = routing.engine
        dispatch = members[engine.engine_id].dispatch(
            uncached_tokens=10,
            blocks=1,
            on_end=holds.hold(engine.life, matches.chain_for(engine)),
        )
        slot.use()
        marks.append(time.perf_counter())
        dispatch.end(Outcome.ANSWERED)
        slot.close()
        for name, start, end in zip(names[1:], marks, marks[1:], strict=False):
            parts[name].append(end - start)
    parts["decision (admit + decide)"] = [
        a + d for a, d in zip(parts["admit"], parts["decide"], strict=True)
    ]
    return parts


def _hold_others(holds, args, rng):
    """Prefixes of the requests in flight: most are strangers, some share half of the prompt."""
    root = block_hash.root(b"n" * 32, b"")
    for number in range(args.engines):
        for _ in range(8):
            shared = args.prompt_tokens // 2 if rng.random() < 0.25 else 0
            ids = [*range(shared), *(rng.randrange(1 << 31) for _ in range(1024))]
            hashes = block_hash.hash_blocks(root, ids, 32)
            holds.hold((f"engine-{number}", 1), block_hash.join_for_index(hashes))


def main():
    """Print a table, or one JSON object with --json."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engines", type=int, default=16)
    parser.add_argument("--requests", type=int, default=5000)
    parser.add_argument("--prompt-tokens", type=int, default=2048)
    parser.add_argument("--policy", choices=sorted(POLICIES), default="least_time")
    parser.add_argument("--rate", type=float, default=0.0, help="a second; 0: one after the other")
    parser.add_argument("--profile", action="store_true", help="show where the time goes")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    args = parser.parse_args()
    if args.profile:
        with cProfile.Profile() as profile:
            asyncio.run(measure(args))
        pstats.Stats(profile).sort_stats("tottime").print_stats(20)
        return
    rows = {}
    for name, seconds in asyncio.run(measure(args)).items():
        cuts = quantiles(seconds, n=100)
        rows[name] = {"p50_us": round(cuts[49] * 1e6, 1), "p95_us": round(cuts[94] * 1e6, 1)}
    if args.json:
        print(
            json.dumps(
                {
                    "engines": args.engines,
                    "policy": args.policy,
                    "rate": args.rate,
                    "load": os.getloadavg(),
                    "parts": rows,
                }
            )
        )
        return
    print(
        f"{args.engines} engines, {args.prompt_tokens} prompt tokens, policy {args.policy}, "
        f"{args.requests} requests, Python {platform.python_version()}"
    )
    for name, row in rows.items():
        print(f"{name:<28} p50 {row['p50_us']:>9.1f} µs   p95 {row['p95_us']:>9.1f} µs")


if __name__ == "__main__":
    main()
