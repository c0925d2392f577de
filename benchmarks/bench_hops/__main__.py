"""What the fleet's hops cost: CPU per streamed message and token, added time to the first one.

    python -m benchmarks.bench_hops --peers DIR --peers OTHER --out FILE

An engine without a model, the balancer, the gateway and this client are processes of their own; the
CPU of a hop is read from its own process, so the client, which shares the cores, does not count.
Beside them run a plain grpc.aio proxy and, from the virtual environments DIR, sglang-router and
smg, which use HTTP with SSE and a source of their own; a peer that does not answer is reported and
left out. A hop may join tokens that are there together: look at both, CPU a message and a token.
Linux only (/proc).
"""

import argparse
import asyncio
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from pathlib import Path

import grpc
import uvloop

from benchmarks.bench_hops import hops, sources
from benchmarks.bench_hops.load import INTERNAL, PUBLIC, Counts, Load, over_grpc, over_sse

Ask = Callable[[Load], Awaitable[Counts]]


def main() -> None:
    args = _arguments()
    if args.role in ("engine", "sse"):
        sources.run(args.role)
    elif args.role:
        hops.run(args.role, args.engine)
    else:
        result = {"benchmark": "hops", **_about(args), "rows": uvloop.run(_measure(args))}
        _print(result)
        if args.out:
            args.out.write_text(json.dumps(result, indent=2) + "\n")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--streams", type=int, default=32, help="of the unpaced load")
    parser.add_argument("--tokens", type=int, default=200, help="of a stream")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--many", type=int, default=256, help="streams of the paced load")
    parser.add_argument("--rate", type=int, default=100, help="tokens a second of a paced stream")
    parser.add_argument(
        "--peers",
        type=Path,
        action="append",
        default=[],
        help="virtual environment with sglang-router or smg; may be given again",
    )
    parser.add_argument("--out", type=Path, help="write the result here as JSON")
    parser.add_argument("--role", help=argparse.SUPPRESS)
    parser.add_argument("--engine", default="", help=argparse.SUPPRESS)
    return parser.parse_args()


async def _measure(args: argparse.Namespace) -> list[dict]:
    rows = []
    with ExitStack() as stack:
        engine = stack.enter_context(hops.role("engine"))
        rows.append(await _row(args, "source, gRPC", [], _grpc(engine.address, INTERNAL)))
        with hops.role("plain", "--engine", engine.address) as plain:
            ask = _grpc(plain.address, INTERNAL)
            rows.append(await _row(args, "plain grpc.aio proxy", [plain], ask))
        balancer = stack.enter_context(hops.role("balancer", "--engine", engine.address))
        ask = _grpc(balancer.address, INTERNAL)
        rows.append(await _row(args, "balancer", [balancer], ask))
        front = stack.enter_context(hops.gateway(engine.address, balancer.address))
        ask = _grpc(front.address, PUBLIC)
        rows.append(await _row(args, "gateway + balancer", [front, balancer], ask))
        ask = _sse(front.http)
        rows.append(await _row(args, "gateway + balancer, SSE", [front, balancer], ask))
    if args.peers:
        with hops.role("sse") as source:
            rows.append(await _row(args, "source, SSE", [], _sse(source.address)))
            for folder in args.peers:
                rows += await _peer_rows(args, folder, source.address)
    return rows


async def _peer_rows(args: argparse.Namespace, folder: Path, source: str) -> list[dict]:
    rows = []
    for name, (command, port) in hops.peer_commands(folder, source).items():
        try:
            with hops.peer(name, command, port) as router:
                rows.append(await _row(args, name, [router], _sse(router.address)))
        except (RuntimeError, OSError) as error:
            print(f"{name} was not measured: {error}", file=sys.stderr)
    return rows


async def _row(args: argparse.Namespace, name: str, passed: list[hops.Hop], ask: Ask) -> dict:
    print(f"{name} …", file=sys.stderr)
    await _serving(ask)
    single = Load(1, 1, rounds=100)
    loads = {
        "unpaced": Load(args.streams, args.tokens, rounds=args.rounds),
        "paced": Load(args.many, args.tokens * 2, args.rate),
    }
    row: dict = {"name": name, "first_ms_alone": (await ask(single)).row()["first_ms"]}
    for kind, load in loads.items():
        before = {hop.name: hop.cpu_s for hop in passed}
        counts = await ask(load)
        used = {hop.name: hop.cpu_s - before[hop.name] for hop in passed}
        row[kind] = counts.row() | {
            "cpu_us_per_message": _each(used, counts.messages),
            "cpu_us_per_token": _each(used, counts.tokens),
        }
    return row


def _each(used: dict[str, float], count: int) -> dict[str, float]:
    shares = {name: round(seconds / count * 1e6, 1) for name, seconds in used.items()}
    return shares | {"all": round(sum(used.values()) / count * 1e6, 1)}


def _grpc(address: str, method: str) -> Ask:
    return lambda load: over_grpc(address, method, load)


def _sse(address: str) -> Ask:
    return lambda load: over_sse(address, load)


async def _serving(ask: Ask) -> None:
    for _ in range(200):
        try:
            await ask(Load(1, 1))
        except (grpc.RpcError, RuntimeError, OSError):
            await asyncio.sleep(0.1)
        else:
            await ask(Load(4, 50))
            return
    raise RuntimeError("nothing was answered for 20 s")


def _about(args: argparse.Namespace) -> dict:
    versions = {"python": platform.python_version(), "grpcio": grpc.__version__}
    for folder in args.peers:
        python = str(folder / "bin" / "python")
        code = "import importlib.metadata as m, json; print(json.dumps({d.name: d.version for d in "
        code += "m.distributions() if d.name in ('sglang-router', 'smg')}))"
        versions |= json.loads(subprocess.check_output([python, "-c", code]))
    return {
        "date": time.strftime("%Y-%m-%d"),
        "command": "python -m benchmarks.bench_hops " + " ".join(sys.argv[1:]),
        "versions": versions,
        "cpus": os.cpu_count(),
        "load_average": os.getloadavg()[0],
        "unpaced": f"{args.streams} streams of {args.tokens} tokens, one a message",
        "paced": f"{args.many} streams at {args.rate} tokens/s each",
    }


def _print(result: dict) -> None:
    print(f"unpaced: {result['unpaced']}; paced: {result['paced']}; {result['versions']}")
    kinds = ("unpaced", "paced")
    heads = [("tok/s", 8), ("tok/msg", 8), ("µs/msg", 8), ("µs/tok", 7), ("p99 ms", 8)]
    titles = "".join(f"{head:>{width}}" for head, width in heads)
    print(f"{'':<24}{'first':>7} | {'unpaced: CPU, gap':<39} | paced: CPU, gap")
    print(f"{'':<24}{'ms':>7} | {titles} | {titles}")
    for row in result["rows"]:
        print(f"{row['name']:<24}{row['first_ms_alone']:>7.2f} | ", end="")
        print(" | ".join(_line(row[kind]) for kind in kinds))


def _line(seen: dict) -> str:
    each, token = seen["cpu_us_per_message"]["all"], seen["cpu_us_per_token"]["all"]
    return (
        f"{seen['tokens_per_s']:>8}{seen['tokens_per_message']:>8}{each:>8}{token:>7}"
        f"{seen['gap_p99_ms']:>8}"
    )


if __name__ == "__main__":
    main()
