"""One model name, engines of two revisions: answers name the revision that answered."""

import asyncio
import json
from pathlib import Path

import httpx
import pytest

from tests.doubles.gateway import running_gateway, sse_events, text_engine


@pytest.fixture
async def both(engine):
    second = text_engine()
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


async def test_fingerprint_and_usage_name_the_engines_own_revision(both, tmp_path):
    usage = str(tmp_path / "usage.jsonl")
    revisions = {double.engine_id: double.revision for double in both}
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
    expected = {}
    async with (
        running_gateway(*both, usage_file=usage) as gateway,
        httpx.AsyncClient(base_url=f"http://{gateway.http}", timeout=20) as http,
    ):
        for index in range(4):  # both engines in turn, each with and without streaming
            sent = {**body, "stream": index >= 2}
            answer = await http.post("/v1/chat/completions", json=sent)
            revision = revisions[answer.headers["x-engine-id"]]
            chunks = sse_events(answer.text)[:-1] if sent["stream"] else [answer.json()]
            assert {chunk["system_fingerprint"] for chunk in chunks} == {revision}
            expected[answer.headers["x-request-id"]] = revision
        records = await records_of(usage, 4)
    assert set(expected.values()) == set(revisions.values())
    assert {record["request_id"]: record["revision"] for record in records} == expected
