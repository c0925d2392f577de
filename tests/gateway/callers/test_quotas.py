"""Quotas at both faces, and over two gateway processes."""

import asyncio
import hashlib
import itertools
import json
import re
import signal
import sys

import grpc
import httpx
import pytest

from inferfleet_proto.v1 import inference_pb2, inference_pb2_grpc
from services.common import errors

KEY, OTHER = "k1", "k2"


def digest(key):
    return "sha256:" + hashlib.sha256(key.encode()).hexdigest()


def bearer(key=KEY):
    return {"authorization": f"Bearer {key}"}


@pytest.fixture
def keys(tmp_path):
    path = tmp_path / "keys"

    def write(limits, key_options=""):
        path.write_text(
            f"acme {digest(KEY)} id=laptop {key_options}\nbeta {digest(OTHER)}\n"
            f"acme limits {limits}\n"
        )
        return str(path)

    return write


def body(**more):
    return {"model": "tiny", "prompt": "ab", "max_tokens": 2, **more}


async def test_http_429_names_the_quota_and_when_to_retry(start_gateway, keys):
    gateway = await start_gateway(api_keys_file=keys("requests_per_min=2 tokens_per_min=1000"))
    async with httpx.AsyncClient(base_url=f"http://{gateway.http}", headers=bearer()) as http:
        good = await http.post("/v1/completions", json=body())
        assert good.status_code == 200
        assert good.headers["x-ratelimit-limit-requests"] == "2"
        assert good.headers["x-ratelimit-remaining-requests"] == "1"
        assert good.headers["x-ratelimit-limit-tokens"] == "1000"
        async with http.stream("POST", "/v1/completions", json=body(stream=True)) as stream:
            assert stream.headers["x-ratelimit-remaining-requests"] == "0"
            assert b"[DONE]" in await stream.aread()
        bad = await http.post("/v1/completions", json=body())
        assert bad.status_code == 429
        assert bad.json()["error"] == {
            "message": "quota requests_per_min of tenant acme is used up: 2 requests per minute",
            "type": "rate_limit_error",
            "param": None,
            "code": "rate_limit_exceeded",
        }
        assert 1 <= int(bad.headers["retry-after"]) <= 30
        assert bad.headers["x-should-retry"] == "true"
        assert bad.headers["x-ratelimit-remaining-requests"] == "0"
        assert (await http.get("/v1/models")).status_code == 200  # costs no quota
        other = await http.post("/v1/completions", json=body(), headers=bearer(OTHER))
        assert other.status_code == 200
        assert "x-ratelimit-limit-requests" not in other.headers


async def test_grpc_resource_exhausted_has_retry_info(start_gateway, engine, keys, scripts):
    engine.script = scripts["hold"]
    gateway = await start_gateway(api_keys_file=keys("tokens_per_min=100", "concurrency=1"))
    metadata = tuple(bearer().items())
    async with grpc.aio.insecure_channel(gateway.address) as channel:
        stub = gateway.stub(channel)
        request = inference_pb2.GenerateRequest(model="tiny", text="ab")
        running = stub.Generate(request, metadata=metadata)
        await running.read()
        headers = dict(await running.initial_metadata())
        assert headers["x-ratelimit-limit-tokens"] == "100"
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Complete(request, metadata=metadata)
        error = errors.error_of(caught.value)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert error.reason == "RATE_LIMIT_EXCEEDED"
        assert error.metadata["quota"] == "concurrency"
        assert error.metadata["scope"] == "key"
        assert error.retry_after_s > 0
        running.cancel()
        await engine.wait_for(lambda: engine.running == 0)
        engine.script = scripts["hello"]
        answer = await until_admitted(stub, request, metadata)
        assert answer.choices[0].text == engine.reply
        # The answer's real tokens were charged, not the reserved ones.
        request.stop.max_tokens = 98
        with pytest.raises(grpc.aio.AioRpcError, match="tokens_per_min of tenant acme"):
            await stub.Complete(request, metadata=metadata)


async def until_admitted(stub, request, metadata):
    async with asyncio.timeout(30):
        while True:
            try:
                return await stub.Complete(request, metadata=metadata)
            except grpc.aio.AioRpcError as error:
                if "concurrency" not in error.details():
                    raise
                await asyncio.sleep(0.02)


async def test_new_limits_count_from_the_next_request_on(start_gateway, keys, monkeypatch):
    monkeypatch.setattr("services.gateway.callers.tenants.CHECK_FILE_EVERY_S", 0.0)
    gateway = await start_gateway(api_keys_file=keys("requests_per_min=1"))
    async with httpx.AsyncClient(base_url=f"http://{gateway.http}", headers=bearer()) as http:
        assert (await http.post("/v1/completions", json=body())).status_code == 200
        assert (await http.post("/v1/completions", json=body())).status_code == 429
        keys("concurrency=4")
        assert (await http.post("/v1/completions", json=body())).status_code == 200


class Process:
    """A gateway as an operator starts it."""

    def __init__(self, child, ready):
        self.child, self.ready = child, ready
        self.http = f"http://{ready['http_address']}"


@pytest.fixture
async def start_process(engine, tmp_path):
    children, numbers = [], itertools.count()

    async def start(**options) -> Process:
        ready = tmp_path / f"ready{next(numbers)}.json"
        flags = {
            "port": 0,
            "http-port": 0,
            "engines": engine.address,
            "balancers": engine.address,
            "ready-file": ready,
            "log-level": "warning",
            # A machine under load may need longer than a gateway would wait.
            "quota-timeout-s": 5,
            **options,
        }
        command = [word for key, value in flags.items() for word in (f"--{key}", str(value))]
        child = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "services.gateway", *command
        )
        children.append(child)
        async with asyncio.timeout(40):
            while not await asyncio.to_thread(ready.exists):
                assert child.returncode is None, "the gateway ended before it was ready"
                await asyncio.sleep(0.02)
        return Process(child, json.loads(await asyncio.to_thread(ready.read_text)))

    yield start
    for child in children:
        if child.returncode is None:
            child.kill()
        await child.wait()


async def counting_together(http, gateway):
    async with asyncio.timeout(30):
        while True:
            metrics = await http.get(f"http://{gateway.ready['metrics_address']}/metrics")
            if "inferfleet_gateway_quota_shared 1.0" in metrics.text:
                return
            await asyncio.sleep(0.05)


@pytest.mark.e2e
@pytest.mark.services
async def test_two_processes_share_the_counts_and_a_killed_one_leaks_no_slot(
    start_process, engine, redis_url, keys, scripts
):
    options = {"redis": redis_url, "api-keys-file": keys("requests_per_min=8 concurrency=2")}
    first, second = await asyncio.gather(start_process(**options), start_process(**options))
    metadata = tuple(bearer().items())
    request = inference_pb2.GenerateRequest(model="tiny", text="ab")
    async with (
        httpx.AsyncClient(headers=bearer(), timeout=20) as http,
        grpc.aio.insecure_channel(first.ready["address"]) as channel,
    ):
        for gateway in (first, second):
            await counting_together(http, gateway)
            assert (await http.post(f"{gateway.http}/v1/completions", json=body())).is_success
        engine.script = scripts["hold"]
        stub = inference_pb2_grpc.InferenceStub(channel)
        streams = [stub.Generate(request, metadata=metadata) for _ in range(2)]
        for stream in streams:
            await stream.read()
        refused = await http.post(f"{second.http}/v1/completions", json=body())
        assert "concurrency of tenant acme" in refused.json()["error"]["message"]
        # Of eight, four are used by both together; some come back while a slow machine gets here.
        assert 4 <= int(refused.headers["x-ratelimit-remaining-requests"]) <= 6
        first.child.send_signal(signal.SIGKILL)
        engine.script = scripts["hello"]
        answers = []
        async with asyncio.timeout(50):
            while len(answers) < 2 or answers[-1].is_success:
                answer = await http.post(f"{second.http}/v1/completions", json=body())
                if "concurrency" in answer.text:
                    await asyncio.sleep(0.05)
                else:
                    answers.append(answer)
        # Eight a minute over both, and a few that came back while the leases ran out.
        assert "requests_per_min of tenant acme" in answers[-1].text
        assert 4 <= len(answers) - 1 <= 12


@pytest.mark.parametrize(
    ("limits", "key_options", "fields", "param", "message"),
    [
        (
            "",
            "concurrency=2",
            {"prompt": ["ab"] * 4},
            "prompt",
            "4 prompts run at once; your key is limited to 2 (concurrency)",
        ),
        (
            "requests_per_min=3",
            "",
            {"prompt": ["ab"] * 4},
            "prompt",
            "4 prompts are as many requests; your tenant is limited to 3 (requests_per_min)",
        ),
        (
            "tokens_per_min=100",
            "",
            {"max_tokens": 51, "n": 2},
            "max_tokens",
            "prompt and output may need 102 tokens; your tenant is limited to 100 (tokens_per_min)",
        ),
        (
            "tokens_per_min=100",
            "",
            {"prompt": ["ab"] * 2, "max_tokens": 51},
            "max_tokens",
            "prompt and output may need 102 tokens; your tenant is limited to 100 (tokens_per_min)",
        ),
    ],
)
async def test_a_request_over_a_whole_quota_is_invalid(
    start_gateway, keys, limits, key_options, fields, param, message
):
    gateway = await start_gateway(api_keys_file=keys(limits, key_options))
    async with httpx.AsyncClient(base_url=f"http://{gateway.http}", headers=bearer()) as http:
        bad = await http.post("/v1/completions", json=body(**fields))
        assert bad.status_code == 400
        assert bad.json()["error"] == {
            "message": f"{param}: {message}",
            "type": "invalid_request_error",
            "param": param,
            "code": "exceeds_quota",
        }
        assert "retry-after" not in bad.headers
        assert (await http.post("/v1/completions", json=body())).status_code == 200


async def test_a_body_that_just_fits_is_let_in(start_gateway, keys):
    limits = "requests_per_min=2 tokens_per_min=100 concurrency=2"
    gateway = await start_gateway(api_keys_file=keys(limits))
    async with httpx.AsyncClient(base_url=f"http://{gateway.http}", headers=bearer()) as http:
        fitting = body(prompt=["ab", "ab"], max_tokens=50)
        assert (await http.post("/v1/completions", json=fitting)).status_code == 200


async def test_a_refusal_for_tokens_names_the_requested_and_the_left(start_gateway, keys):
    gateway = await start_gateway(api_keys_file=keys("tokens_per_min=20"))
    async with httpx.AsyncClient(base_url=f"http://{gateway.http}", headers=bearer()) as http:
        assert (await http.post("/v1/completions", json=body())).status_code == 200
        bad = await http.post("/v1/completions", json=body(max_tokens=20))
    assert bad.status_code == 429
    message = r"20 tokens per minute; requested 20, left 1\d"
    assert re.search(message, bad.json()["error"]["message"])
