"""Starts, measures and stops our fleet, llama-server and vLLM's server in turn.

    python -m benchmarks.bench_peers --threads 2 --llama-cpp DIR --vllm PYTHON \\
        --output benchmarks/results

Each has the machine to itself. The client of bench_serve measures all of them with the same
prompts: 128 tokens in, 128 out. Servers without a path are left out. benchmarks/README.md says how
to install the peers.
"""

import argparse
import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

import httpx

from benchmarks import bench_serve
from benchmarks.bench_engine.export import export_folder
from benchmarks.bench_engine.sides import llama_models
from services.engine.model_files.known_models import find_model

_READY_S = 600.0
_STOP_S = 60.0


@contextlib.contextmanager
def ours(options: argparse.Namespace, dtype: str) -> Iterator[bench_serve.Target]:
    """Gateway, balancer and one engine."""
    port = _free_port()
    with tempfile.TemporaryDirectory() as state:
        fleet = [sys.executable, "-m", "inferfleet_cli.main"]
        where = ["--state-dir", state]
        up = ["up", "--engines", "1", "--dtype", dtype, "--port", str(port), "--http-port", "0"]
        keys = ["--set", f"engine.threads={options.threads}", "--end-with", str(os.getpid())]
        subprocess.run([*fleet, *up, *where, *keys, "--detach"], check=True, stdout=sys.stderr)
        try:
            yield bench_serve.GrpcTarget(f"127.0.0.1:{port}", None)
        finally:
            subprocess.run([*fleet, "down", *where], check=True, stdout=sys.stderr)


@contextlib.contextmanager
def http_server(command: list[str], port: int, threads: int) -> Iterator[bench_serve.Target]:
    """Any server that tells its health; ended in the end."""
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as log:
        process = subprocess.Popen(
            command,
            env=os.environ
            | {
                "OMP_NUM_THREADS": str(threads),
                "VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}",
                "VLLM_CPU_KVCACHE_SPACE": "1",
            },
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        try:
            _wait_healthy(process, port, log)
            yield bench_serve.HttpTarget(f"http://127.0.0.1:{port}/v1", None)
        finally:
            process.terminate()
            try:
                process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def llama_server(options: argparse.Namespace, model: Path):
    """llama.cpp with a slot for every stream of the highest level."""
    port, slots = _free_port(), max(options.concurrency)
    sizes = {
        "-m": model,
        "-t": options.threads,
        "-tb": options.threads,
        "-np": slots,
        "-c": slots * (options.input_len + options.output_len + 16),
        "--port": port,
    }
    command = [str(options.llama_cpp / "bin" / "llama-server")]
    command += [str(part) for pair in sizes.items() for part in pair]
    return http_server(command, port, options.threads)


def vllm_server(options: argparse.Namespace, folder: Path, dtype: str):
    """vLLM's OpenAI-compatible server."""
    port = _free_port()
    command = [options.vllm, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder)]
    command += ["--dtype", dtype, "--port", str(port), "--max-model-len", "2048"]
    command += ["--max-num-seqs", str(max(options.concurrency)), "--enforce-eager"]
    return http_server([*command, "--no-enable-prefix-caching"], port, options.threads)


def servers(options: argparse.Namespace, folder: Path) -> Iterator[tuple[str, object]]:
    """Names and what starts them."""
    for dtype in options.dtypes:
        yield f"ours {dtype}", ours(options, dtype)
    if options.llama_cpp:
        models = llama_models(options.llama_cpp.resolve(), find_model("").path, folder)
        for dtype in ("Q4_1", "F32"):
            yield f"llama-server {dtype}", llama_server(options, models[dtype])
    if options.vllm:
        export_folder(folder / "model")
        for dtype in ("bfloat16", "float32"):
            yield f"vllm {dtype}", vllm_server(options, folder / "model", dtype)


async def run(options: argparse.Namespace, folder: Path) -> dict[str, dict]:
    """All servers one after the other: seconds to start, and the levels."""
    found: dict[str, dict] = {}
    for name, server in servers(options, folder):
        print(f"starting {name}", file=sys.stderr, flush=True)
        began = time.perf_counter()
        with server as target:
            seconds = time.perf_counter() - began
            try:
                await bench_serve._one(target, [1000] * 16, 4)  # connections, first-use costs
                levels = [
                    await bench_serve.measure(target, options, level)
                    for level in options.concurrency
                ]
            finally:
                await target.close()
        found[name] = {"start_s": round(seconds, 1), "levels": [asdict(v) for v in levels]}
        print(f"{name}: ready after {seconds:.1f} s\n{bench_serve.table(levels)}", flush=True)
    return found


def ratios(found: Mapping[str, dict]) -> list[dict]:
    """Ours over each peer: tokens per second and median time to first token, by level."""
    lines = []
    for of, own in found.items():
        for to, other in found.items():
            if not of.startswith("ours") or to.startswith("ours"):
                continue
            for mine, theirs in zip(own["levels"], other["levels"], strict=True):
                lines.append(
                    {
                        "of": of,
                        "to": to,
                        "concurrency": mine["concurrency"],
                        "tokens_per_s": round(mine["tokens_per_s"] / theirs["tokens_per_s"], 2),
                        "ttft_p50": round(mine["ttft_p50"] / theirs["ttft_p50"], 2),
                    }
                )
    return lines


def _wait_healthy(process: subprocess.Popen, port: int, log) -> None:
    end = time.monotonic() + _READY_S
    while time.monotonic() < end and process.poll() is None:
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(f"http://127.0.0.1:{port}/health", timeout=5).status_code == 200:
                return
        time.sleep(0.5)
    log.seek(0)
    tail = "\n  ".join(log.read().splitlines()[-8:])
    raise RuntimeError(f"{process.args[0]} does not serve:\n  {tail}")


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]


def parse() -> argparse.Namespace:
    """Flags."""
    parser = argparse.ArgumentParser(
        prog="benchmarks.bench_peers",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--dtypes", nargs="+", default=["int8", "float32"], help="ours")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="of each engine")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--requests", type=int, default=0, help="per level; default 2 × level, ≥ 4")
    parser.add_argument("--input-len", type=int, default=128)
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--llama-cpp", type=Path, metavar="DIR", help="a build with bin/ in it")
    parser.add_argument("--vllm", metavar="PYTHON", help="a Python that has vLLM's CPU build")
    parser.add_argument("--work", type=Path, help="keep models made for peers here")
    parser.add_argument("--output", type=Path, help="folder for the JSON file")
    return parser.parse_args(namespace=argparse.Namespace(seed=0, prefix_len=0))


def main() -> None:
    """Print a table per server; with --output also write a dated JSON file."""
    options = parse()
    with contextlib.ExitStack() as stack:
        folder = options.work or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder.mkdir(parents=True, exist_ok=True)
        found = asyncio.run(run(options, folder))
    compared = ratios(found)
    for line in compared:
        print(
            f"{line['of']} / {line['to']} at {line['concurrency']}: "
            f"tokens/s {line['tokens_per_s']}, TTFT p50 {line['ttft_p50']}"
        )
    if options.output:
        options.output.mkdir(parents=True, exist_ok=True)
        date = datetime.now(UTC).isoformat(timespec="seconds")
        record = {
            "benchmark": "bench_served",
            "date": date,
            "model": find_model("").name,
            "threads": options.threads,
            "tokens": {"in": options.input_len, "out": options.output_len},
            "load_average": [round(value, 2) for value in os.getloadavg()],
            "servers": found,
            "ratios": compared,
        }
        path = options.output / f"{date[:10]}-served.json"
        path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        print(f"written to {path}")


if __name__ == "__main__":
    main()
