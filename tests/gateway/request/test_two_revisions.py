"""One plain name, engines of two revisions: what is told is the revision that answered."""

import asyncio
import json
from pathlib import Path

import httpx
import pytest

from tests.doubles.gateway_fleet import EngineDouble, running_gateway, sse_events


@pytest.fixture
async def both(engine):
    second = EngineDouble()
    second.engine_id, second.revision = "engine-2", "sha256:other"
    await second.start()
    yield engine, second
    await second.stop()


async def records_of(path, count):
    async with asyncio.timeout(30):
        while True:
            lines = (await asyncio.to_thread(Path(path).read_text)).splitlines()
            if len(lines) >= count:
                return [json.loads(line) for line in lines]
            await asyncio.sleep(0.02)


async def test_fingerprint_and_usage_tell_the_engines_own_revision(both, tmp_path):
    usage = str(tmp_path / "usage.jsonl")
    revisions = {double.engine_id: double.revision for double in both}
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
    expected = {}
    async with (
        running_gateway(*both, usage_file=usage) as gateway,
        httpx.AsyncClient(base_url=f"http://{gateway.http}", timeout=20) as http,
    ):
        for index in range(4):  # the double takes turns: each of both is asked both ways
            asked = {**body, "stream": index >= 2}
            answer = await http.post("/v1/chat/completions", json=asked)
            revision = revisions[answer.headers["x-engine-id"]]
            told = sse_events(answer.text)[:-1] if asked["stream"] else [answer.json()]
            assert {chunk["system_fingerprint"] for chunk in told} == {revision}
            expected[answer.headers["x-request-id"]] = revision
        records = await records_of(usage, 4)
    assert set(expected.values()) == set(revisions.values())
    assert {record["request_id"]: record["revision"] for record in records} == expected
