"""Usage and audit records: one per request however it ended, without any prompt."""

import asyncio
import hashlib
import json
from pathlib import Path

import grpc
import httpx
import pytest
import redis.asyncio as aioredis

from inferfleet_proto.v1 import inference_pb2
from services.common.errors import DataLossError, UnavailableError
from tests.doubles.gateway import running_gateway, text_engine

KEY = "k1"
CANARY = "xanthous-quokka"


@pytest.fixture
def files(tmp_path):
    keys = tmp_path / "keys"
    digest = hashlib.sha256(KEY.encode()).hexdigest()
    keys.write_text(f"acme sha256:{digest} id=laptop\nacme limits requests_per_min=100\n")
    return {
        "api_keys_file": str(keys),
        "usage_file": str(tmp_path / "usage.jsonl"),
        "audit_file": str(tmp_path / "audit.jsonl"),
    }


async def lines_of(path, count):
    """The file's records once there are `count`."""
    async with asyncio.timeout(30):
        while True:
            text = await asyncio.to_thread(Path(path).read_text)
            if text.count("\n") >= count:
                return [json.loads(line) for line in text.splitlines()]
            await asyncio.sleep(0.02)


async def cut_after_one_token(stub, request, metadata, engine):
    call = stub.Generate(request, metadata=metadata)
    for _ in range(2):
        await call.read()
    call.cancel()
    await engine.wait_for(lambda: engine.running == 0)


async def fails(call):
    with pytest.raises(grpc.aio.AioRpcError):
        await call


async def test_one_record_for_each_way_a_request_can_end(start_gateway, engine, files, scripts):
    gateway = await start_gateway(**files)
    metadata = (("authorization", f"Bearer {KEY}"),)
    request = inference_pb2.GenerateRequest(model="tiny", text="abc")
    async with grpc.aio.insecure_channel(gateway.address) as channel:
        stub = gateway.stub(channel)
        await stub.Complete(request, metadata=metadata)
        engine.script = scripts["hold"]
        await cut_after_one_token(stub, request, metadata, engine)
        engine.script = scripts["fail"](DataLossError("NaN"), after=2)
        await fails(stub.Complete(request, metadata=metadata))
        engine.script = scripts["fail"](UnavailableError("none", retry_after_s=1))
        await fails(stub.Complete(request, metadata=metadata))
        await fails(stub.Complete(inference_pb2.GenerateRequest(model="no"), metadata=metadata))
    records = await lines_of(files["usage_file"], 5)
    counts = [
        (r["status"], r["prompt_tokens"], r["output_tokens"], r["cached_tokens"]) for r in records
    ]
    length = len(engine.reply.encode()) + 1
    assert counts == [
        ("OK", 3, length, 3),
        ("CANCELLED", 3, 1, 3),
        ("DATA_LOSS", 3, 2, 3),
        ("UNAVAILABLE", 0, 0, 0),
        ("NOT_FOUND", 0, 0, 0),
    ]
    first = records[0]
    assert (first["tenant"], first["key_id"], first["model"]) == ("acme", "laptop", "tiny")
    assert first["revision"] == "sha256:weights"
    assert first["total_s"] > 0
    assert first["time"].endswith("Z")
    assert len({record["request_id"] for record in records}) == 5


async def test_a_resumed_request_is_recorded_and_charged_once(files):
    """The first balancer dies in mid-stream, the second resumes."""
    first, second = text_engine(), text_engine()
    second.engine_id = "engine-2"
    for double in (first, second):
        await double.start()
    broken = asyncio.Event()

    async def breaks(request, double):
        yield double.started(request)
        yield double.delta(request, 0, "H", [72])
        await broken.wait()
        raise UnavailableError("gone")

    async def resumes(request, double):
        yield double.started(request)
        yield double.delta(request, 0, "i", [105])
        yield inference_pb2.GenerateResponse(finished={"reason": "FINISH_REASON_EOS"})
        yield double.summary(request, 1)

    async def either(request, double):
        script = resumes if request.continuation.choices else breaks
        async for event in script(request, double):
            yield event

    first.script = second.script = either
    metadata = (("authorization", f"Bearer {KEY}"),)
    async with running_gateway(first, second, **files) as gateway:
        async with grpc.aio.insecure_channel(gateway.address) as channel:
            stub = gateway.stub(channel)
            request = inference_pb2.GenerateRequest(model="tiny", text="abc")
            call = stub.Generate(request, metadata=metadata)
            await call.read()
            await call.read()
            broken.set()
            while await call.read() is not grpc.aio.EOF:
                pass
        [record] = await lines_of(files["usage_file"], 1)
    for double in (first, second):
        await double.stop()
    assert record["status"] == "OK"
    assert (record["prompt_tokens"], record["output_tokens"]) == (3, 2)
    assert record["continuations"] == 1


async def test_the_audit_log_names_caller_request_and_reason(start_gateway, files, monkeypatch):
    monkeypatch.setattr("services.gateway.callers.tenants.CHECK_FILE_EVERY_S", 0.0)
    gateway = await start_gateway(**files)
    url = f"http://{gateway.http}/v1/completions"
    body = {"model": "tiny", "prompt": "ab", "max_tokens": 2, "n": 2}
    async with httpx.AsyncClient() as http:
        shown = {"authorization": f"Bearer {KEY}"}
        await http.post(url, json=body, headers={**shown, "x-request-id": "r1"})
        await http.post(url, json={**body, "temperature": 9}, headers=shown)
        await http.post(url, json=body, headers={"authorization": "Bearer wrong"})
        await http.get(f"http://{gateway.http}/v1/models", headers=shown)
        await asyncio.to_thread(Path(files["api_keys_file"]).write_text, "nonsense\n")
        await http.get(f"http://{gateway.http}/v1/models", headers=shown)
    await gateway.service.drain()
    # The file's own follower may note the bad keys several times.
    lines = await lines_of(files["audit_file"], 7)
    while lines[-1]["event"] != "drain":
        lines = await lines_of(files["audit_file"], len(lines) + 1)
    allowed, bad, unknown, listed, reload, *_, drain = lines
    assert allowed.pop("time").endswith("Z")
    assert allowed.pop("peer").startswith("127.0.0.1:")
    assert allowed["asked"].pop("bytes") > 0
    assert allowed == {
        "event": "request",
        "decision": "allowed",
        "method": "POST /v1/completions",
        "tenant": "acme",
        "key_id": "laptop",
        "request_id": "r1",
        "model": "tiny",
        "asked": {"prompt": "text", "n": 2, "max_tokens": 2},
    }
    assert (bad["decision"], bad["why"]) == ("refused", "INVALID_ARGUMENT")
    assert bad["field"] == "sampling.temperature"
    assert (unknown["why"], unknown.get("tenant")) == ("INVALID_API_KEY", None)
    assert listed["method"] == "GET /v1/models"
    assert (reload["event"], reload["decision"]) == ("keys", "failed")
    assert (drain["event"], drain["decision"]) == ("drain", "done")


async def test_changed_keys_are_audited_without_any_request(start_gateway, files):
    await start_gateway(**files)
    await asyncio.to_thread(Path(files["api_keys_file"]).write_text, "nonsense\n")
    [reload] = await lines_of(files["audit_file"], 1)
    assert (reload["event"], reload["decision"]) == ("keys", "failed")


async def test_records_go_to_a_redis_stream_as_well(start_gateway, redis_url, files):
    stream = {"redis": redis_url, "usage_stream": "usage", "usage_stream_entries": 100}
    gateway = await start_gateway(**files, **stream)
    async with httpx.AsyncClient(headers={"authorization": f"Bearer {KEY}"}) as http:
        await http.post(
            f"http://{gateway.http}/v1/completions", json={"model": "tiny", "prompt": "ab"}
        )
    [line] = await lines_of(files["usage_file"], 1)
    async with aioredis.Redis.from_url(redis_url) as client, asyncio.timeout(30):
        while not (entries := await client.xrange("usage")):  # noqa: ASYNC110 (Redis's state)
            await asyncio.sleep(0.02)
    assert json.loads(entries[0][1][b"record"]) == line


@pytest.mark.parametrize("key", ["usage_file", "audit_file"])
async def test_a_file_that_cannot_be_written_is_named(engine, key, tmp_path):
    with pytest.raises(ValueError, match=f"{key}: cannot write it"):
        async with running_gateway(engine, **{key: str(tmp_path / "none" / "file")}):
            pass
