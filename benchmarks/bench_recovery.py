"""How soon a killed engine serves again, and what streams notice of it.

    python -m benchmarks.bench_recovery --kills 5 --streams 8 --spare-engines 1 --json out.json

Starts a fleet of its own. Each kill ends one engine with SIGKILL while streams run; the benchmark
prints the seconds until the balancer has as many engines as before, and the longest pause of each
stream that moved to another engine. Kills are more than a minute apart, so that each is the first
after a good run, as in service.
"""

import argparse
import asyncio
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

from inferfleet import AsyncClient, Delta, InferfleetError, Summary
from inferfleet_cli.supervisor.engine_list import list_engines

POLL_S = 0.05
LONGEST_S = 60.0
PROMPT = "Tell a long story about a lighthouse and the people who keep it."


class Streams:
    """Runs a number of streams, one after the other on each lane."""

    def __init__(self, address: str, lanes: int) -> None:
        self._client = AsyncClient(address)
        self._tasks = [asyncio.ensure_future(self._run()) for _ in range(lanes)]
        self.pauses_s: list[float] = []
        """Of each stream that moved: its longest pause."""
        self.ended = 0
        self.failed = 0

    async def close(self) -> None:
        """Cut the running streams."""
        for task in self._tasks:
            task.cancel()
        await asyncio.wait(self._tasks) if self._tasks else None
        await self._client.close()
        for task in self._tasks:
            if not task.cancelled():
                task.result()

    async def _run(self) -> None:
        while True:
            try:
                await self._stream()
                self.ended += 1
            except InferfleetError as error:
                print(f"a stream failed: {error}", file=sys.stderr)
                self.failed += 1

    async def _stream(self) -> None:
        longest, last = 0.0, None
        stream = await self._client.generate(
            PROMPT, max_tokens=400, temperature=0.0, ignore_eos=True
        )
        async for event in stream:
            now = time.monotonic()
            if isinstance(event, Delta):
                longest = max(longest, now - (last or now))
                last = now
            elif isinstance(event, Summary) and event.continuations:
                self.pauses_s.append(longest)


async def measure(state: Path, kills: int, lanes: int, between_s: float) -> dict[str, Any]:
    """Kill engines of the fleet in `state`, one at a time."""
    record = json.loads((state / "fleet.json").read_text())
    token = (state / "fleet.token").read_text().strip()
    streams = Streams(record["gateway"], lanes)
    backs_s = []
    try:
        wanted = await _serving(record["admin"], token)
        for number in range(kills):
            await asyncio.sleep(between_s)
            victim = sorted(wanted)[number % len(wanted)]
            began = time.monotonic()
            os.kill(_pid_of(state, victim), signal.SIGKILL)
            gone, now = False, wanted
            while not gone or len(now) < len(wanted):
                if time.monotonic() - began > LONGEST_S:
                    raise SystemExit(f"{victim} is not back after {LONGEST_S:g} s")
                await asyncio.sleep(POLL_S)
                now = await _serving(record["admin"], token)
                gone = gone or victim not in now
            backs_s.append(time.monotonic() - began)
            print(f"kill {number + 1}: {len(now)} engines again after {backs_s[-1]:.2f} s")
            wanted = now
        await asyncio.sleep(5)  # for the last ones to end, and to be counted
    finally:
        await streams.close()
    return {
        "back_s": [round(one, 2) for one in backs_s],
        "pauses_s": sorted(round(one, 2) for one in streams.pauses_s),
        "pause_p50_s": round(median(streams.pauses_s), 2) if streams.pauses_s else None,
        "streams": streams.ended,
        "failed": streams.failed,
    }


async def _serving(admin: str, token: str) -> set[str]:
    """Ids of the engines that take requests."""
    listed = await list_engines(admin, token)
    return {
        one["engine_id"]
        for one in listed["engines"]
        if one["registered"] and one["state"] == "serving"
    }


def _pid_of(state: Path, engine: str) -> int:
    return int(json.loads((state / "ready" / f"{engine}.json").read_text())["pid"])


def main() -> int:
    """Start a fleet, measure, print and write the result, stop it."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.bench_recovery", description=__doc__
    )
    parser.add_argument("--engines", type=int, default=2)
    parser.add_argument("--spare-engines", type=int, default=0)
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--streams", type=int, default=0, help="that run all the time")
    parser.add_argument("--between-s", type=float, default=65.0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        fleet = [sys.executable, "-m", "inferfleet_cli.main"]
        state = ["--state-dir", folder]
        counts = [f"--engines={args.engines}", f"--spare-engines={args.spare_engines}"]
        up = [*fleet, "up", "--detach", *counts, "--port=0", "--http-port=0", *state]
        subprocess.run(up, check=True)
        try:
            found = asyncio.run(measure(Path(folder), args.kills, args.streams, args.between_s))
        finally:
            subprocess.run([*fleet, "down", *state], check=True)
    found |= {
        "date": date.today().isoformat(),
        "command": " ".join(sys.argv),
        "machine": f"{platform.machine()}, {os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}",
    }
    print(json.dumps(found, indent=2))
    if args.json:
        args.json.write_text(json.dumps(found, indent=2) + "\n")
    return 1 if found["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
