"""A real core process behind a real link: rounds, refusals, snapshots and both kinds of death."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from services.engine.compute.simulated_runner import checksum_of
from services.engine.contract.config import EngineConfig
from services.engine.contract.core_link import CoreDiedError, CoreLink
from services.engine.contract.messages import (
    AbortRequest,
    AddRequest,
    CoreRequest,
    RoundReport,
    SendSnapshot,
)
from services.engine.contract.sampling_params import SamplingParams
from services.engine.front.config import FrontConfig

CONFIG = EngineConfig(simulate="vocab_size=64,eos=63", num_blocks=64, block_size=4)
_FRONT = """
import asyncio, sys
from services.engine.contract.config import EngineConfig
from services.engine.contract.core_link import CoreLink
async def main():
    link = CoreLink()
    await link.start(EngineConfig(simulate="yes", num_blocks=8))
    print(link.pid, flush=True)
    await asyncio.sleep(600)
asyncio.run(main())
"""


def request(key: str, prompt=range(1, 9), **params) -> AddRequest:
    fields = {"temperature": 0.0, "seed": 1, "max_tokens": 3, "ignore_eos": True, **params}
    return AddRequest(key, CoreRequest(list(prompt), SamplingParams(**fields)))


async def until(link: CoreLink, done) -> list[RoundReport]:
    """Reports up to the first that `done` accepts."""
    reports = []
    async for report in link:
        reports.append(report)
        if done(report):
            return reports
    raise AssertionError("the link ended")


def released(key: str):
    return lambda report: any(m.verb == "release" and m.request_key == key for m in report.marks)


async def started(config=CONFIG) -> CoreLink:
    link = CoreLink()
    ready = await link.start(config)
    assert ready.block_size == config.block_size
    return link


async def test_a_core_that_was_spawned_before_is_the_one_that_starts():
    link = CoreLink()
    link.spawn(CONFIG)
    pid = link.pid
    assert (await link.start(CONFIG)).block_size == CONFIG.block_size
    assert link.pid == pid
    await link.stop()
    assert has_ended(pid)


def has_ended(pid: int) -> bool:
    """Whether a process has ended (a zombie has)."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return True
    return state == "Z"


def wait_gone(pid: int) -> None:
    """Wait until a process has ended."""
    limit = time.monotonic() + 20
    while not has_ended(pid):
        assert time.monotonic() < limit, f"process {pid} lives on"
        time.sleep(0.01)


async def gone(pid: int) -> None:
    await asyncio.to_thread(wait_gone, pid)


async def test_a_request_runs_in_another_process():
    link = await started()
    assert link.pid != os.getpid()
    link.send([request("a"), request("bad", prompt=[]), request("b")])
    reports = await until(link, released("b"))
    tokens = [i for r in reports for o in r.outputs if o.request_key == "a" for i in o.token_ids]
    history = list(range(1, 9))
    for _ in range(3):
        history.append(checksum_of(history) % 64)
    assert tokens == history[8:]
    failures = [f for r in reports for f in r.failures]
    assert [(f.request_key, f.code, f.field) for f in failures] == [
        ("bad", "INVALID_ARGUMENT", "token_ids")
    ]
    assert sum(m.verb == "release" for r in reports for m in r.marks) == 3
    assert reports[-1].load.running_requests == 0
    assert reports[-1].load.held_blocks == 0
    stored = [h for r in reports for e in r.cache_events for h in e.hashes]
    assert len(stored) == 2
    link.send([SendSnapshot()])
    (*_, last) = await until(link, lambda report: report.snapshot is not None)
    assert [h for chain in last.snapshot for h in chain.hashes] == stored
    await link.stop()


async def test_a_cancel_reaches_a_running_request():
    link = await started(EngineConfig(simulate="forward_ms=2,eos=0", num_blocks=64))
    link.send([request("a", max_tokens=2000)])
    await until(link, lambda report: bool(report.outputs))
    link.send([AbortRequest(request_key="a")])
    reports = await until(link, released("a"))
    assert len(reports) < 50
    await link.stop()


async def test_keys_of_the_front_stay_with_the_front():
    link = await started(FrontConfig(simulate="yes", num_blocks=8))
    await link.stop()


async def test_a_bad_configuration_ends_the_start_with_its_reason():
    link = CoreLink()
    with pytest.raises(CoreDiedError, match="max_model_len: 4096 is more than the model's 2048"):
        await link.start(EngineConfig(simulate="yes", max_model_len=4096))
    await link.stop()


async def test_the_front_learns_that_its_core_was_killed():
    link = await started()
    os.kill(link.pid, signal.SIGKILL)
    with pytest.raises(CoreDiedError, match="SIGKILL"):
        await until(link, lambda report: False)
    link.send([request("lost")])
    await link.stop()
    await link.stop()


async def test_signals_to_the_group_leave_the_core_to_its_front():
    link = await started()
    for signum in (signal.SIGINT, signal.SIGTERM):
        os.kill(link.pid, signum)
    link.send([request("a")])
    await until(link, released("a"))
    await link.stop()


async def test_a_core_ends_with_its_front():
    front = await asyncio.create_subprocess_exec(
        sys.executable, "-c", _FRONT, stdout=subprocess.PIPE
    )
    pid = int(await front.stdout.readline())
    front.kill()
    await front.wait()
    await gone(pid)


async def test_reports_end_quietly_after_a_stop():
    link = await started()
    reader = asyncio.create_task(until(link, lambda report: False))
    await asyncio.sleep(0)
    await link.stop()
    with pytest.raises(AssertionError, match="the link ended"):
        await reader
    await gone(link.pid)


async def test_a_request_that_is_gone_when_the_core_first_sees_it_is_answered_all_the_same():
    """Or a core that goes on after a stop would never be known to."""
    link = await started()
    try:
        link.send([request("a"), AbortRequest(request_key="a")])
        async with asyncio.timeout(30):
            assert await until(link, released("a"))
    finally:
        await link.stop()
