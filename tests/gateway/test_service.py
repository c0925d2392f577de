"""The gateway as an operator runs it: its own process, a real etcd, grpcurl as the client."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import grpc
import httpx
import pytest
from google.protobuf import json_format

from inferfleet_proto.internal.v1 import engine_pb2
from inferfleet_proto.v1 import inference_pb2, inference_pb2_grpc
from services.common.etcd.client import Etcd
from services.common.etcd.registry import BALANCERS_PREFIX, ENGINES_PREFIX, Registration
from tests.doubles.scripts import hold_after_first

pytestmark = [pytest.mark.e2e, pytest.mark.services]


class Process:
    """`python -m services.gateway` and its ready file."""

    def __init__(self, process, ready):
        self.process = process
        self.ready = ready

    async def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(20):
            return await self.process.wait()


async def run(*command) -> tuple[int, str]:
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    async with asyncio.timeout(30):
        out, _ = await process.communicate()
    return process.returncode, out.decode()


@pytest.fixture
async def registered(start_etcd, engine):
    """An etcd of this test's own, with `engine` in it as both engine and balancer."""
    server = start_etcd()
    etcd = Etcd([server.address])
    info = await engine.GetInfo(engine_pb2.GetInfoRequest(), None)
    values = {
        f"{ENGINES_PREFIX}engine-1": json_format.MessageToJson(info).encode(),
        f"{BALANCERS_PREFIX}b1": json.dumps({"address": engine.address}).encode(),
    }
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(etcd.close)
        for key, value in values.items():
            registration = Registration(etcd, key, lambda value=value: value)
            await registration.start()
            stack.push_async_callback(registration.stop)
            await registration.wait_registered()
        yield server


@pytest.fixture
async def process(registered, tmp_path):
    ready = tmp_path / "ready.json"
    flags = ("--port", "0", "--http-port", "0", "--log-level", "warning")
    child = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "services.gateway",
        *flags,
        *("--etcd", registered.address, "--ready-file", str(ready)),
    )
    async with asyncio.timeout(30):
        while not await asyncio.to_thread(ready.exists):
            assert child.returncode is None, "the gateway ended before it was ready"
            await asyncio.sleep(0.02)
    yield Process(child, json.loads(ready.read_text()))
    if child.returncode is None:
        child.kill()
    await child.wait()


async def draining(http) -> None:
    async with asyncio.timeout(10):
        while (await http.get("/healthz")).status_code == 200:  # noqa: ASYNC110 (its state)
            await asyncio.sleep(0.02)


async def complete(address) -> str:
    async with grpc.aio.insecure_channel(address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        request = inference_pb2.GenerateRequest(model="tiny", text="ab")
        return (await stub.Complete(request, wait_for_ready=True)).choices[0].text


async def to_end(call) -> None:
    while await call.read() is not grpc.aio.EOF:
        pass


async def test_a_running_stream_is_drained(process, engine):
    """SIGTERM: health says no, new requests are refused, the running stream ends by itself."""
    resume = asyncio.Event()

    async def paused(request, double):
        yield double.started(request)
        yield double.delta(request, 0, "a", [97])
        await resume.wait()
        yield double.delta(request, 0, "b", [98])
        yield inference_pb2.GenerateResponse(finished={"reason": "FINISH_REASON_EOS"})
        yield double.summary(request, 2)

    assert await complete(process.ready["address"]) == engine.reply
    engine.script = paused
    async with grpc.aio.insecure_channel(process.ready["address"]) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        request = inference_pb2.GenerateRequest(model="tiny", text="ab")
        call = stub.Generate(request)
        events = [await call.read(), await call.read()]
        stopped = asyncio.create_task(process.stop())
        base = f"http://{process.ready['http_address']}"
        async with httpx.AsyncClient(base_url=base) as http:
            await draining(http)
            body = {"model": "tiny", "prompt": "x"}
            assert (await http.post("/v1/completions", json=body)).status_code == 503
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Complete(request)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        resume.set()
        while (event := await call.read()) is not grpc.aio.EOF:
            events.append(event)
    assert "".join(event.delta.text for event in events) == "ab"
    assert await stopped == 0


async def test_etcd_may_go_away(process, registered, engine):
    assert await complete(process.ready["address"]) == engine.reply
    registered.kill()
    for _ in range(5):
        assert await complete(process.ready["address"]) == engine.reply
    assert await process.stop() == 0


async def test_grpcurl_lists_describes_and_calls(process, engine):
    address = process.ready["address"]
    code, out = await run("grpcurl", "-plaintext", address, "list")
    assert code == 0, out
    assert "inferfleet.v1.Inference" in out
    assert "grpc.health.v1.Health" in out
    code, out = await run("grpcurl", "-plaintext", address, "describe", "inferfleet.v1.Inference")
    assert "returns ( stream .inferfleet.v1.GenerateResponse )" in out
    code, out = await run("grpcurl", "-plaintext", address, "grpc.health.v1.Health/Check")
    assert "SERVING" in out
    body = '{"model": "tiny", "text": "ab"}'
    method = "inferfleet.v1.Inference/Generate"
    code, out = await run("grpcurl", "-plaintext", "-d", body, address, method)
    assert code == 0, out
    assert "FINISH_REASON_EOS" in out
    wrong = '{"model": "tiny", "text": "ab", "sampling": {"temperature": -1}}'
    code, out = await run("grpcurl", "-plaintext", "-d", wrong, address, method)
    assert "InvalidArgument" in out
    assert "sampling.temperature" in out


async def test_a_killed_gateway_frees_its_streams(process, engine):
    engine.script = hold_after_first
    async with grpc.aio.insecure_channel(process.ready["address"]) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        call = stub.Generate(inference_pb2.GenerateRequest(model="tiny", text="ab"))
        await call.read()
        os.kill(process.ready["pid"], signal.SIGKILL)
        with pytest.raises(grpc.aio.AioRpcError):
            await to_end(call)
    await engine.wait_for(lambda: engine.running == 0)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ([], "etcd: needed"),
        (["--etcd", "x:1", "--http-port", "99999"], "http_port: must be at most 65535"),
        (["--etcd", "x:1", "--aliases", "a"], "aliases: 'a' is not of the form alias=model"),
        (["--etcd", "x:1", "--api-keys-file", "/none"], "api_keys_file: cannot read"),
        (["--etcd", "x:1", "--tls-ca-file", "/none"], "tls_cert_file: needed"),
    ],
)
async def test_a_bad_configuration_is_one_line_and_status_2(flags, words):
    code, out = await run(sys.executable, "-m", "services.gateway", *flags)
    assert code == 2
    assert out.startswith(f"python -m services.gateway: {words}")
    assert len(out.splitlines()) == 1


async def test_a_taken_port_is_named(engine):
    host, port = engine.address.split(":")
    del host
    flags = ["--engines", engine.address, "--balancers", engine.address]
    for key, other in (("--port", "--http-port"), ("--http-port", "--port")):
        command = [sys.executable, "-m", "services.gateway", *flags, key, port, other, "0"]
        code, out = await run(*command)
        assert code == 2, out
        name = key.strip("-").replace("-", "_")
        assert f"{name}: cannot listen on 127.0.0.1:{port}" in out


def test_the_gateway_imports_no_tensor_library():
    """What a gateway imports, in a fresh interpreter."""
    code = (
        "import services.gateway.service, sys;"
        "bad = {'torch', 'transformers', 'xgrammar', 'triton', 'kernels'} & set(sys.modules);"
        "sys.exit(str(bad) if bad else 0)"
    )
    root = Path(__file__).parents[2]
    subprocess.run([sys.executable, "-c", code], check=True, timeout=50, cwd=root)
