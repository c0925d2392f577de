"""What the balancer's hop costs: CPU per streamed message, added time to the first one.

    python -m benchmarks.bench_hops --streams 32 --messages 200

An engine that only streams, the balancer and this client are three processes; the same calls go
once straight to the engine and once through the balancer. CPU is read from the balancer's own
process, so a busy client does not count. Linux only (/proc).
"""

import argparse
import asyncio
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

import grpc
import uvloop
from google.protobuf import json_format
from opentelemetry.sdk.trace import TracerProvider

from inferfleet.internal.v1 import engine_pb2, engine_pb2_grpc
from inferfleet.v1 import inference_pb2
from services.balancer.config import BalancerConfig
from services.balancer.server import BalancerService
from services.common import rpc
from services.common.registry import ENGINES_PREFIX
from services.common.telemetry import Telemetry

MODEL = "bench"


class StreamingEngine(engine_pb2_grpc.EngineServicer):
    """Streams max_tokens deltas as fast as it can."""

    def __init__(self):
        self.info = engine_pb2.EngineInfo(
            engine_id="e", epoch_ms=1, model=MODEL, block_size=32, max_num_seqs=4096
        )

    async def WatchLoad(self, request, context):
        while True:
            yield engine_pb2.LoadReport(engine_id="e", epoch_ms=1, total_blocks=1000)
            await asyncio.sleep(0.5)

    async def Run(self, request, context):
        make = inference_pb2.GenerateResponse
        yield make(started=inference_pb2.Started(request_id=request.request.request_id))
        delta = make(delta=inference_pb2.Delta(text=" word", token_ids=[1234], num_tokens=1))
        for _ in range(request.request.stop.max_tokens):
            yield delta
        yield make(summary=inference_pb2.Summary(exact=True))


class OneKey:
    """A registry that holds one engine for ever."""

    connected = True

    def __init__(self, info):
        self._items = {ENGINES_PREFIX + info.engine_id: json_format.MessageToJson(info).encode()}

    def snapshot(self):
        return self._items

    async def wait_change(self, version):
        return await asyncio.Event().wait()


async def serve_engine():
    """Print the engine's address and serve."""
    server = rpc.make_server()
    engine_pb2_grpc.add_EngineServicer_to_server(StreamingEngine(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(f"127.0.0.1:{port}", flush=True)
    await asyncio.Event().wait()


async def serve_balancer(engine_address):
    """Print the balancer's address and serve."""
    info = StreamingEngine().info
    info.address = engine_address
    service = BalancerService(BalancerConfig(), Telemetry(TracerProvider()), OneKey(info))
    await service.start()
    print(service.address, flush=True)
    await asyncio.Event().wait()


def cpu_s(pid):
    """Seconds of CPU that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def load(address, streams, messages, rounds):
    """Run `streams` calls at once, `rounds` times; messages per second and first-message times."""
    request = engine_pb2.EngineRequest(
        request=inference_pb2.GenerateRequest(
            model=MODEL,
            request_id="r",
            token_ids=inference_pb2.TokenIds(ids=range(128)),
            stop=inference_pb2.StopParams(max_tokens=messages),
        )
    ).SerializeToString()
    firsts, count = [], 0

    async def one(method):
        nonlocal count
        began, first = time.perf_counter(), None
        async for _ in method(request):
            first = first or time.perf_counter() - began
            count += 1
        firsts.append(first)

    async with grpc.aio.insecure_channel(address) as channel:
        method = channel.unary_stream("/inferfleet.internal.v1.Engine/Run")
        began = time.perf_counter()
        for _ in range(rounds):
            await asyncio.gather(*(one(method) for _ in range(streams)))
        wall_s = time.perf_counter() - began
    return {"messages": count, "per_s": count / wall_s, "first_ms": median(firsts) * 1e3}


def start(*flags):
    """A role in a process of its own, and what it prints first."""
    command = [sys.executable, "-m", "benchmarks.bench_hops", *flags]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    return process, process.stdout.readline().strip()


async def compare(args):
    """The same load straight and through the balancer."""
    engine, engine_address = start("--role", "engine")
    balancer, address = start("--role", "balancer", "--engine", engine_address)
    try:
        await wait_serving(address)
        results = {}
        for name, target in (("engine alone", engine_address), ("through the balancer", address)):
            await load(target, 4, 50, 1)
            single = await load(target, 1, 1, args.rounds * 10)
            before = cpu_s(balancer.pid)
            results[name] = await load(target, args.streams, args.messages, args.rounds)
            results[name]["first_ms_alone"] = single["first_ms"]
            used = cpu_s(balancer.pid) - before
            results[name]["balancer_cpu_us"] = used / results[name]["messages"] * 1e6
        return results
    finally:
        for process in (balancer, engine):
            process.kill()
            process.wait()


async def wait_serving(address):
    """Return once the balancer has found its engine."""
    for _ in range(100):
        try:
            await load(address, 1, 1, 1)
        except grpc.RpcError:
            await asyncio.sleep(0.1)
        else:
            return
    raise SystemExit("the balancer found no engine")


def main():
    """Print a table, or one JSON object with --json."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--streams", type=int, default=32, help="calls at once")
    parser.add_argument("--messages", type=int, default=200, help="deltas of a call")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    parser.add_argument("--role", choices=("engine", "balancer"), help=argparse.SUPPRESS)
    parser.add_argument("--engine", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.role == "engine":
        uvloop.run(serve_engine())
    elif args.role == "balancer":
        uvloop.run(serve_balancer(args.engine))
    else:
        results = uvloop.run(compare(args))
        if args.json:
            print(json.dumps(results))
            return
        print(f"{args.streams} streams × {args.messages} messages, {args.rounds} rounds")
        print(f"grpcio {grpc.__version__}, Python {platform.python_version()}, uvloop")
        for name, row in results.items():
            print(
                f"{name:<22} {row['per_s']:>8.0f} messages/s   first message "
                f"{row['first_ms_alone']:>6.2f} ms alone, {row['first_ms']:>7.1f} ms at load   "
                f"balancer CPU {row['balancer_cpu_us']:>6.1f} µs/message"
            )


if __name__ == "__main__":
    main()
