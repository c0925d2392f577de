"""Answers as users of pydantic and zod describe them: taken, and parsed by the openai clients.

An engine is played by a script; the check, the compiler and the matcher are the real ones. The
answers are drawn from what the grammar allows.
"""

import asyncio
import json
import random
import shutil
from pathlib import Path

import openai
import pytest

from services.engine.contract.sampling_params import Constraint
from services.engine.grammar.constraint_check import check_constraint
from services.engine.grammar.structured_output import SOMatcher, SOMatcherBuilder
from services.engine.grammar.wire import Setup
from tests.client.parse.pydantic_models import MODELS
from tests.doubles.fake_engine import MODEL
from tests.doubles.scripts import EOS, say_hello

pytestmark = [pytest.mark.tools, pytest.mark.timeout(600)]
FOLDER = Path(__file__).parent / "parse"
MOST = 600


@pytest.fixture(scope="module")
def builder():
    made = SOMatcherBuilder(Setup("", 300, [EOS], 2 << 30), timeout_s=30)
    yield made
    made.close()


@pytest.fixture
def answering(engine, builder):
    """The engine answers what the constraint allows; what it was sent is in `seen`."""
    engine.max_model_len = 4096
    engine.seen = []

    async def answer(request, double):
        text = request.request.constraint.json_schema
        constraint = Constraint("json_schema", text)
        double.seen.append(check_constraint(constraint))
        double.reply = await asyncio.to_thread(drawn, builder, constraint)
        async for event in say_hello(request, double):
            yield event

    engine.script = answer
    return engine


def drawn(builder: SOMatcherBuilder, constraint: Constraint) -> str:
    """A short answer that the grammar allows."""
    builder.submit(constraint.text, constraint)
    built = next((one for _ in range(600) for one in builder.pump() or wait(builder)), None)
    assert built is not None, "no grammar"
    assert built.problem is None, built.problem
    draw, matcher, text = random.Random(1), built.grammar.matcher(), bytearray()
    while not matcher.must_end and len(text) < MOST:
        if (token := next_byte(matcher, draw, len(text))) is None:
            break
        assert matcher.accept(token)
        text.append(token)
    assert matcher.accept(EOS), text
    return text.decode()


def wait(builder: SOMatcherBuilder) -> list:
    builder.wait(0.1)
    return []


def next_byte(matcher: SOMatcher, draw: random.Random, length: int) -> int | None:
    """Ends texts and lists soon, and writes no year 0 and no number beyond a double."""
    assert matcher.mask is not None
    words = matcher.mask.view("uint8")
    allowed = [i for i in range(300) if words[i // 8] >> (i % 8) & 1]
    if EOS in allowed:
        return None
    ends = b'"}].@:,\\DHMS'
    for group in (ends, b"Z", b"abx", b"12", b"0123456789", b"-TP/"):
        found = [i for i in allowed if i in group]
        if found and (group is not ends or draw.random() < 0.3 + length / 300):
            return draw.choice(found)
    return draw.choice([i for i in allowed if i < 256])


@pytest.fixture
async def client(answering, gateway):
    async with openai.AsyncOpenAI(
        base_url=f"http://{gateway.http}/v1", api_key="none", max_retries=0
    ) as client:
        yield client


async def test_pydantic_models_are_served_and_parsed(client, answering):
    assert len(MODELS) >= 30
    for model in MODELS:
        messages = [{"role": "user", "content": "x"}]
        reply = await client.chat.completions.parse(
            model=MODEL, messages=messages, response_format=model
        )
        assert isinstance(reply.choices[0].message.parsed, model), reply
    assert set(answering.seen) == {"xgrammar", "llguidance"}


async def test_zod_schemas_are_served_and_parsed(answering, gateway, tmp_path):
    """In a folder of its own, so that no node_modules is left in the tree."""
    node, npm = shutil.which("node"), shutil.which("npm")
    assert node, "node is missing: install Node 20 or later"
    assert npm, "npm is missing: install it with Node"
    shutil.copy(FOLDER / "zod_schemas.mjs", tmp_path)
    packages = {"openai": "^6.0.0", "zod": "^4.0.0"}
    (tmp_path / "package.json").write_text(json.dumps({"private": True, "dependencies": packages}))
    code, out = await run(npm, "install", "--no-audit", "--no-fund", cwd=tmp_path)
    assert code == 0, out
    base = f"http://{gateway.http}/v1"
    code, out = await run(node, "zod_schemas.mjs", base, MODEL, cwd=tmp_path)
    results = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    assert [one for one in results if one["problem"]] == []
    assert code == 0, out
    assert len(results) >= 30


async def run(*command, cwd) -> tuple[int, str]:
    process = await asyncio.create_subprocess_exec(
        *command, cwd=cwd, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    async with asyncio.timeout(400):
        out, _ = await process.communicate()
    return process.returncode, out.decode()
