"""What a Match costs through gRPC, and what a (block, owner) costs in Redis.

    python -m benchmarks.bench_match --blocks 1000 --engines 16 --rate 200 --seconds 20

Redis, the service and this client are three processes. Requests are sent at fixed times whether or
not earlier ones have returned, so waiting counts. `hot`: every engine holds the whole prompt;
`mixed`: engine i holds the first (i+1)/engines of it; `cold`: no engine holds any.

    python -m benchmarks.bench_match --index-blocks 10000000

fills the index with so many other blocks first (about two minutes for ten million), each with one
owner, and prints how much memory they take in Redis.
"""

import argparse
import asyncio
import json
import os
import platform
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import grpc
import redis
import uvloop

from inferfleet_cli.supervisor.dev_backends import RedisProcess, tied_to_parent
from inferfleet_proto.internal.v1 import prefix_index_pb2 as pb
from inferfleet_proto.internal.v1 import prefix_index_pb2_grpc
from services.kvcache.events import HISTORY, Batch, Operation
from services.kvcache.index import PrefixIndex, Status
from services.kvcache.redis_settings import RedisSettings

READY_S = 30
BYTES_BLOCKS = 50_000
FILL = 1_000


def main() -> None:
    args = _arguments()
    with tempfile.TemporaryDirectory() as folder:
        server = RedisProcess.start(Path(folder) / "redis", settings={"maxmemory": "0"})
        try:
            result = uvloop.run(_measure(args, server, Path(folder)))
        finally:
            server.stop()
    print(json.dumps(result, indent=2))
    if args.out:
        Path(args.out).write_text(json.dumps(result, indent=2) + "\n")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--blocks", type=int, default=1000, help="full blocks of a prompt")
    parser.add_argument("--engines", type=int, default=16)
    parser.add_argument("--rate", type=float, default=200.0, help="requests per second")
    parser.add_argument("--seconds", type=float, default=20.0, help="per case")
    parser.add_argument(
        "--index-blocks", type=int, default=0, help="other blocks in the index meanwhile"
    )
    parser.add_argument("--out", help="write the result here as JSON")
    return parser.parse_args()


async def _measure(args: argparse.Namespace, server: RedisProcess, folder: Path) -> dict:
    costs = {owners: await _bytes(server, folder, owners) for owners in (1, 2, args.engines)}
    with redis.Redis.from_url(server.url) as client:
        client.flushall()
        about = client.info("server")
        full = await _fill(args, server, client)
    service, address = _start_service(server.url, folder)
    try:
        async with grpc.aio.insecure_channel(address) as channel:
            stub = prefix_index_pb2_grpc.PrefixIndexStub(channel)
            cases = {}
            for name, held in _cases(args.blocks, args.engines).items():
                print(f"{name}: {args.seconds:.0f} s at {args.rate:.0f}/s", file=sys.stderr)
                prompt = await _publish(stub, args, name, held)
                cases[name] = await _ask(stub, args, prompt, service.pid, server.pid)
    finally:
        service.terminate()
        service.wait()
    return {
        "benchmark": "match",
        "date": time.strftime("%Y-%m-%d"),
        "command": "python -m benchmarks.bench_match " + " ".join(sys.argv[1:]),
        "machine": {
            "cpus": os.cpu_count(),
            "python": platform.python_version(),
            # Neighbours on the same cores show in the tail long before they show in the median.
            "load_average": os.getloadavg()[0],
        },
        "redis": about.get("valkey_version") or about["redis_version"],
        "blocks": args.blocks,
        "engines": args.engines,
        "rate_per_s": args.rate,
        "bytes_per_block_and_owner": costs,
        "index": full,
        "cases": cases,
    }


def _cases(blocks: int, engines: int) -> dict[str, Callable[[int], int]]:
    return {
        "hot": lambda i: blocks,
        "mixed": lambda i: blocks * (i + 1) // engines,
        "cold": lambda i: 0,
    }


async def _fill(args: argparse.Namespace, server: RedisProcess, client: redis.Redis) -> dict:
    """Other blocks, spread over the engines as owners; written without a service in between."""
    before, began = client.info("memory")["used_memory"], time.monotonic()
    index = PrefixIndex(
        RedisSettings(server.url), entry_ttl_s=86_400, max_entries=args.index_blocks + 1
    )
    await index.start()
    for written in range(0, args.index_blocks, FILL):
        engine, sequence = written // FILL % args.engines, written // FILL // args.engines + 1
        event = Operation("S", HISTORY, os.urandom(16 * min(FILL, args.index_blocks - written)))
        applied = await index.apply(Batch(f"other-{engine}", 1, sequence, (event,)))
        assert applied.status is Status.APPLIED, applied
        if written % (FILL * 100) == 0:
            print(f"\r{written:,} blocks", end="", file=sys.stderr)
    await index.close()
    memory = client.info("memory")
    return {
        "other_blocks": args.index_blocks,
        "fill_seconds": round(time.monotonic() - began, 1),
        "redis_used_mib": round(memory["used_memory"] / 2**20, 1),
        "redis_rss_mib": round(memory["used_memory_rss"] / 2**20, 1),
        "bytes_per_block": round((memory["used_memory"] - before) / max(args.index_blocks, 1), 1),
    }


def _start_service(url: str, folder: Path) -> tuple["subprocess.Popen[bytes]", str]:
    ready = folder / "ready.json"
    argv = [sys.executable, "-m", "services.kvcache", "--redis", url, "--ready-file", str(ready)]
    argv += ["--max-entries", "1000000000"]
    service = subprocess.Popen(tied_to_parent(argv), stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + READY_S
    while not ready.exists():
        if service.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError("the service did not start")
        time.sleep(0.05)
    return service, json.loads(ready.read_text())["address"]


def _digests(name: str, count: int) -> list[bytes]:
    generator = random.Random(name)
    return [generator.randbytes(16) for _ in range(count)]


async def _publish(stub, args: argparse.Namespace, name: str, held) -> bytes:
    """Make each engine hold its part of a new prompt; returns the prompt."""
    prompt = _digests(name, args.blocks)
    for i in range(args.engines):
        await _publish_one(stub, f"{name}-{i}", b"".join(prompt[: held(i)]))
    return b"".join(prompt)


async def _publish_one(stub, engine: str, hashes: bytes) -> None:
    event = pb.BlockEvent(stored=pb.Stored(block_hashes=hashes, kind=pb.BLOCK_KIND_HISTORY))
    call = stub.Publish()
    await call.write(pb.PublishRequest(engine_id=engine, epoch_ms=1, sequence=1, events=[event]))
    answer = await call.read()
    while answer.need_snapshot:  # Redis was late once: say it again
        part = pb.SnapshotPart(part=0, last=True)
        await call.write(
            pb.PublishRequest(
                engine_id=engine, epoch_ms=1, sequence=2, events=[event], snapshot=part
            )
        )
        answer = await call.read()
    assert answer.acked_sequence, answer
    await call.done_writing()
    await call.read()


async def _ask(stub, args: argparse.Namespace, prompt: bytes, *pids: int) -> dict:
    request = pb.MatchRequest(block_hashes=prompt)
    for _ in range(50):
        await stub.Match(request)
    before = [_cpu_s(pid) for pid in pids]
    times: list[float] = []
    unknown = 0

    async def one(at: float) -> None:
        nonlocal unknown
        reply = await stub.Match(request, timeout=5.0)
        times.append(time.monotonic() - at)
        unknown += not reply.known

    began = time.monotonic()
    tasks = []
    for i in range(int(args.rate * args.seconds)):
        at = began + i / args.rate
        await asyncio.sleep(max(0.0, at - time.monotonic()))
        tasks.append(asyncio.create_task(one(at)))
    await asyncio.gather(*tasks)
    spent = [_cpu_s(pid) - cpu for pid, cpu in zip(pids, before, strict=True)]
    times.sort()
    reply = await stub.Match(request)
    return {
        "requests": len(times),
        "unknown": unknown,
        "engines_found": len(reply.engines),
        "longest": max((m.matched_blocks for m in reply.engines), default=0),
        **{f"p{q}_ms": round(_quantile(times, q / 100) * 1e3, 2) for q in (50, 90, 99)},
        "max_ms": round(times[-1] * 1e3, 2),
        "service_cpu_us": round(spent[0] / len(times) * 1e6),
        "redis_cpu_us": round(spent[1] / len(times) * 1e6),
    }


async def _bytes(server: RedisProcess, folder: Path, owners: int) -> float:
    """Bytes of Redis's memory per (block, owner) when every block has so many owners."""
    with redis.Redis.from_url(server.url) as client:
        client.flushall()
        service, address = _start_service(server.url, folder)
        try:
            before = client.info("memory")["used_memory"]
            hashes = _digests("bytes", BYTES_BLOCKS)
            async with grpc.aio.insecure_channel(address) as channel:
                stub = prefix_index_pb2_grpc.PrefixIndexStub(channel)
                for i in range(owners):
                    await _publish_one(stub, f"bytes-{i}", b"".join(hashes))
            used = client.info("memory")["used_memory"] - before
        finally:
            service.terminate()
            service.wait()
            (folder / "ready.json").unlink()
    return round(used / BYTES_BLOCKS / owners, 1)


def _quantile(ordered: list[float], q: float) -> float:
    return ordered[min(int(len(ordered) * q), len(ordered) - 1)]


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    main()
