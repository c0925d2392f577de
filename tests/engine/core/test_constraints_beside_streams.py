"""A core process with constraints: what it starts, when, and what becomes of it."""

import asyncio
import dataclasses
import os
import re
import signal
import time
from pathlib import Path

import pytest

from services.engine.contract.config import EngineConfig
from services.engine.contract.core_link import CoreDiedError, CoreLink
from services.engine.contract.messages import AddRequest, CoreRequest
from services.engine.contract.sampling_params import Constraint, SamplingParams

# The first constraint waits for a process that loads xgrammar.
pytestmark = pytest.mark.timeout(240)
CONFIG = EngineConfig(
    simulate="vocab_size=259,max_model_len=2048,eos=258,forward_ms=2", grammar_timeout_s=3
)
WORD = Constraint("regex", "[a-f]{3,6}-[0-9]{2}")
BOMB = Constraint("regex", "|".join(f"w{i}(x|y{{0,100}}){{0,40}}" for i in range(300)))


class Core:
    """A core in a process of its own, and what it says by request."""

    def __init__(self, link: CoreLink) -> None:
        self.link = link
        self.tokens: dict[str, list[int]] = {}
        self.ends: dict[str, str] = {}
        self.steps: list[int] = []

    def add(self, key: str, **params) -> None:
        params.setdefault("seed", 1)
        request = CoreRequest(prompt_token_ids=[1, 2], params=SamplingParams(**params))
        self.link.send([AddRequest(key, request)])

    async def read(self, *keys: str) -> None:
        """Until all of them have ended."""
        async with asyncio.timeout(120):
            async for report in self.link:
                self.steps.append(report.step)
                for output in report.outputs:
                    self.tokens.setdefault(output.request_key, []).extend(output.token_ids)
                    if output.finish_reason:
                        self.ends[output.request_key] = output.finish_reason
                for failure in report.failures:
                    self.ends[failure.request_key] = failure.reason
                if all(key in self.ends for key in keys):
                    return

    def children(self) -> list[int]:
        tasks = Path(f"/proc/{self.link.pid}/task").iterdir()
        return [int(pid) for task in tasks for pid in (task / "children").read_text().split()]


@pytest.fixture
async def core():
    link = CoreLink()
    await link.start(CONFIG)
    yield Core(link)
    await link.stop()


def maps(pid: int | None) -> str:
    return Path(f"/proc/{pid}/maps").read_text()


async def test_a_warm_core_has_its_compiler_before_it_is_ready():
    link = CoreLink()
    await link.start(dataclasses.replace(CONFIG, warm_grammars=True))
    try:
        core = Core(link)
        assert len(core.children()) == 1
        assert "xgrammar" in maps(link.pid)
        core.add("word", constraint=WORD)
        await core.read("word")
        assert re.fullmatch(WORD.text, bytes(core.tokens["word"]).decode())
    finally:
        await link.stop()


async def test_nothing_is_loaded_or_started_before_the_first_constraint(core):
    core.add("plain", max_tokens=3)
    await core.read("plain")
    assert core.children() == []
    assert "xgrammar" not in maps(core.link.pid)
    core.add("word", constraint=WORD)
    await core.read("word")
    assert re.fullmatch(WORD.text, bytes(core.tokens["word"]).decode())
    assert core.ends["word"] == "GRAMMAR_COMPLETE"
    assert len(core.children()) == 1


async def test_streams_run_while_a_bomb_is_compiled(core):
    core.add("word", constraint=WORD)
    await core.read("word")
    core.add("bomb", constraint=BOMB)
    for number in range(8):
        core.add(f"plain{number}", max_tokens=30, ignore_eos=True)
    await core.read(*(f"plain{number}" for number in range(8)))
    assert "bomb" not in core.ends
    before, began = len(core.steps), time.monotonic()
    await core.read("bomb")
    took_s = time.monotonic() - began
    assert core.ends["bomb"] == "CONSTRAINT_TOO_COSTLY"
    # While only a compilation is awaited the core says that it lives, and does not spin.
    reports = len(core.steps) - before
    assert took_s // 2 <= reports <= 3 + 2 * took_s


async def test_the_compiler_dies_with_its_core(core):
    core.add("word", constraint=WORD)
    await core.read("word")
    (compiler,) = core.children()
    os.kill(core.link.pid, signal.SIGKILL)
    with pytest.raises(CoreDiedError):
        await core.read("never")
    await asyncio.to_thread(_wait_gone, compiler)


def _wait_gone(pid: int) -> None:
    give_up = time.monotonic() + 20
    while _runs(pid):
        assert time.monotonic() < give_up
        time.sleep(0.02)


def _runs(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"
