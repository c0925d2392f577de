"""The first constraint of an engine's life, beside streams that run."""

import asyncio
import re
from pathlib import Path

import pytest

from services.common.text import Tokenizer
from services.engine.contract.config import EngineConfig
from services.engine.contract.core_link import CoreLink
from services.engine.contract.messages import AddRequest, CoreRequest
from services.engine.contract.sampling_params import Constraint, SamplingParams
from services.engine.model_files import load_text_assets
from tests.doubles.tiny_model import write_tiny_model

pytestmark = pytest.mark.timeout(240)
WORD = Constraint("regex", "[a-f]{3,6}-[0-9]{2}")


@pytest.fixture
def folder(tmp_path):
    return write_tiny_model(tmp_path / "tiny")


@pytest.fixture
async def link(folder):
    link = CoreLink()
    config = EngineConfig(model=str(folder), num_blocks=64, threads=1, device="cpu")
    await link.start(config)
    yield link
    await link.stop()


def libraries(pid: int | None) -> set[str]:
    return set(re.findall(r"/\S+\.so\S*", Path(f"/proc/{pid}/maps").read_text()))


def add(link: CoreLink, key: str, **params) -> None:
    link.send([AddRequest(key, CoreRequest([1, 2], SamplingParams(**params)))])


async def test_the_first_constraint_loads_nothing_beside_streams_and_they_go_on(link, folder):
    loaded = libraries(link.pid)
    assert any("xgrammar" in library for library in loaded)
    running = 0
    add(link, f"plain{running}", seed=1, max_tokens=60, ignore_eos=True)
    word: list[int] = []
    steps_while_waiting = 0
    ended = ""
    async with asyncio.timeout(200):
        async for report in link:
            for output in report.outputs:
                if output.request_key == "word":
                    word += output.token_ids
                    ended = output.finish_reason or ""
                elif output.finish_reason:  # some stream runs all the time
                    running += 1
                    add(link, f"plain{running}", seed=1, max_tokens=60, ignore_eos=True)
            steps_while_waiting += bool(report.step) and not word
            if report.step == 5:
                add(link, "word", seed=1, temperature=1.0, constraint=WORD)
            if ended:
                break
    assert ended == "GRAMMAR_COMPLETE"
    text = Tokenizer(load_text_assets(str(folder))).decode(word)
    assert re.fullmatch(WORD.text, text)
    assert steps_while_waiting > 20
    assert libraries(link.pid) == loaded
