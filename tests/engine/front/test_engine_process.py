"""`python -m services.engine` as it runs: front and core processes, simulated model, signals."""

import asyncio
import json
import os
import signal
import sys
import urllib.request
from contextlib import AsyncExitStack

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from inferfleet_proto.internal.v1 import engine_pb2, engine_pb2_grpc
from inferfleet_proto.v1 import inference_pb2, inference_pb2_grpc
from services.common import errors

# End tokens are out of the draw's way: what is tested here is not the model.
SIMULATE = "vocab_size=259,max_model_len=2048,eos=258,forward_ms=2"
LONG = inference_pb2.StopParams(max_tokens=2000, ignore_eos=True)


class Process:
    """One engine process and a client to it."""

    def __init__(self, process, ready, log):
        self.process = process
        self.ready = ready
        self.log = log
        self.channel = grpc.aio.insecure_channel(ready["address"])
        self.engine = engine_pb2_grpc.EngineStub(self.channel)

    async def end(self):
        async with asyncio.timeout(30):
            return await self.process.wait()

    def core_pid(self):
        children = f"/proc/{self.process.pid}/task"
        for task in os.listdir(children):
            with open(f"{children}/{task}/children") as file:
                for pid in file.read().split():
                    return int(pid)
        raise AssertionError("the engine has no core")

    def lines(self):
        return [json.loads(line) for line in self.log.read_text().splitlines()]


@pytest.fixture
async def spawn(tmp_path):
    async with AsyncExitStack() as stack:

        async def start(*flags):
            ready_file, log = tmp_path / "ready.json", tmp_path / "log"
            with log.open("wb") as sink:
                process = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-m", "services.engine", "--simulate", SIMULATE),
                    *("--ready-file", str(ready_file), *flags),
                    stderr=sink,
                )
            stack.push_async_callback(_kill, process)
            async with asyncio.timeout(40):
                while not ready_file.exists():
                    assert process.returncode is None, log.read_text()
                    await asyncio.sleep(0.05)
            engine = Process(process, json.loads(ready_file.read_text()), log)
            stack.push_async_callback(engine.channel.close)
            return engine

        yield start


async def _kill(process):
    if process.returncode is None:
        process.kill()
    await process.wait()


def request(name, stop=LONG, ids=range(40), **parts):
    return engine_pb2.EngineRequest(
        request=inference_pb2.GenerateRequest(
            model="fake",
            token_ids=inference_pb2.TokenIds(ids=ids),
            request_id=name,
            stop=stop,
            sampling=inference_pb2.SamplingParams(temperature=0, seed=1),
            **parts,
        )
    )


async def until(engine, holds):
    """Loads up to the first that `holds`; returns how many rounds' reports it took."""
    call = engine.engine.WatchLoad(engine_pb2.WatchLoadRequest())
    async with asyncio.timeout(20):
        while not holds(await call.read()):
            pass
    call.cancel()


async def whole(call):
    events = []
    while (event := await call.read()) is not grpc.aio.EOF:
        events.append(event)
    return events


async def refused(call):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await whole(call)
    return errors.error_of(caught.value)


def _get(url):
    with urllib.request.urlopen(url) as answer:
        return answer.read().decode()


def _rounds(text):
    (line,) = [row for row in text.splitlines() if row.startswith("inferfleet_engine_rounds_total")]
    return float(line.split()[1])


async def test_a_stream_its_repeat_and_its_cache(spawn):
    engine = await spawn("--engine-id", "e1")
    stop = inference_pb2.StopParams(max_tokens=20, ignore_eos=True)
    ids = [n % 250 for n in range(100)]
    first = await whole(engine.engine.Run(request("a", stop, ids)))
    again = await whole(engine.engine.Run(request("b", stop, ids)))
    tokens = [[t for e in events for t in e.delta.token_ids] for events in (first, again)]
    assert len(tokens[0]) == 20
    assert tokens[0] == tokens[1]
    assert first[0].started.cached_tokens == 0
    assert again[0].started.cached_tokens == 96
    assert again[0].started.engine_id == "e1"
    timings = again[-1].summary.timings
    assert timings.prefill_s > 0
    assert timings.decode_s > timings.prefill_s / 100


async def test_a_client_that_leaves_frees_its_blocks(spawn):
    engine = await spawn()
    gone = engine.engine.Run(request("gone"))
    stays = engine.engine.Run(request("stays", ids=range(100, 140)))
    for call in (gone, stays):
        while not (await call.read()).HasField("delta"):
            pass
    await until(engine, lambda load: load.running_requests == 2)
    gone.cancel()
    await until(engine, lambda load: load.running_requests == 1)
    stays.cancel()
    await until(engine, lambda load: load.running_requests == 0 and load.held_blocks == 0)


async def test_its_blocks_are_free_within_two_rounds(spawn):
    engine = await spawn("--simulate", "vocab_size=259,eos=258,forward_ms=500")
    url = f"http://{engine.ready['metrics_address']}/metrics"
    call = engine.engine.Run(request("gone"))
    while not (await call.read()).HasField("delta"):
        pass
    before = _rounds(await asyncio.to_thread(_get, url))
    call.cancel()
    await until(engine, lambda load: load.held_blocks == 0)
    after = _rounds(await asyncio.to_thread(_get, url))
    # The round under way, the one that is launched before the abort is read, and their outcome.
    assert after - before <= 3


async def test_leaving_while_queued_or_in_prefill(spawn):
    engine = await spawn("--max-num-seqs", "1", "--max-num-batched-tokens", "16")
    prefill = engine.engine.Run(request("prefill", ids=[7] * 1500))
    queued = engine.engine.Run(request("queued"))
    await until(engine, lambda load: load.waiting_requests == 1 and load.running_requests == 1)
    prefill.cancel()
    queued.cancel()
    await until(engine, lambda load: load.waiting_requests + load.running_requests == 0)
    await until(engine, lambda load: load.held_blocks == 0)
    text = await asyncio.to_thread(_get, f"http://{engine.ready['metrics_address']}/metrics")
    assert 'inferfleet_engine_requests_total{code="CANCELLED",finish_reason=""} 2.0' in text


async def test_the_core_is_killed_in_mid_stream(spawn):
    engine = await spawn("--max-num-seqs", "1")
    running = engine.engine.Run(request("running"))
    while not (await running.read()).HasField("delta"):
        pass
    waiting = engine.engine.Run(request("waiting"))
    await until(engine, lambda load: load.waiting_requests == 1)
    os.kill(engine.core_pid(), signal.SIGKILL)
    error = await refused(running)
    assert isinstance(error, errors.AbortedError)
    assert int(error.metadata["completion_tokens"]) > 0
    assert isinstance(await refused(waiting), errors.UnavailableError)
    assert await engine.end() == 1
    assert any("SIGKILL" in line["message"] for line in engine.lines())


async def test_sigterm_lets_running_streams_end(spawn):
    engine = await spawn()
    stop = inference_pb2.StopParams(max_tokens=300, ignore_eos=True)
    call = engine.engine.Run(request("running", stop))
    while not (await call.read()).HasField("delta"):
        pass
    engine.process.send_signal(signal.SIGTERM)
    await until(engine, lambda load: load.draining)
    error = await refused(engine.engine.Run(request("new")))
    assert isinstance(error, errors.UnavailableError)
    health = health_pb2_grpc.HealthStub(engine.channel)
    answer = await health.Check(health_pb2.HealthCheckRequest())
    assert answer.status == health_pb2.HealthCheckResponse.NOT_SERVING
    events = await whole(call)
    assert events[-1].summary.usage.completion_tokens == 300
    assert await engine.end() == 0


async def test_sigterm_ends_what_outlives_the_grace(spawn):
    engine = await spawn("--drain-grace-s", "0.1")
    call = engine.engine.Run(request("running"))
    while not (await call.read()).HasField("delta"):
        pass
    engine.process.send_signal(signal.SIGTERM)
    assert isinstance(await refused(call), errors.AbortedError)
    assert await engine.end() == 0


async def test_a_second_sigterm_ends_streams_with_a_status_too(spawn):
    engine = await spawn("--drain-grace-s", "60")
    call = engine.engine.Run(request("running"))
    while not (await call.read()).HasField("delta"):
        pass
    engine.process.send_signal(signal.SIGTERM)
    await until(engine, lambda load: load.draining)
    engine.process.send_signal(signal.SIGTERM)
    error = await refused(call)
    assert isinstance(error, errors.AbortedError)
    assert error.reason == "DRAINING"
    assert int(error.metadata["completion_tokens"]) > 0
    assert await engine.end() == 0


async def test_the_deadline_passes_in_the_queue(spawn):
    engine = await spawn("--max-num-seqs", "1")
    running = engine.engine.Run(request("running"))
    while not (await running.read()).HasField("delta"):
        pass
    late = engine.engine.Run(request("late"), timeout=0.3)
    assert isinstance(await refused(late), errors.DeadlineExceededError)
    await until(engine, lambda load: load.waiting_requests == 0)
    running.cancel()


async def test_many_streams_end_and_leave_nothing(spawn):
    engine = await spawn("--max-num-seqs", "8", "--stream-buffer-tokens", "100000")
    stop = inference_pb2.StopParams(max_tokens=30, ignore_eos=True)
    calls = [engine.engine.Run(request(f"r{n}", stop, [n, n + 1, n + 2] * 20)) for n in range(24)]
    streams = await asyncio.gather(*map(whole, calls))
    assert all(len([t for e in s for t in e.delta.token_ids]) == 30 for s in streams)
    await until(engine, lambda load: load.held_blocks == 0 and load.running_requests == 0)
    url = f"http://{engine.ready['metrics_address']}"
    text = await asyncio.to_thread(_get, f"{url}/metrics")
    assert 'inferfleet_engine_requests_total{code="OK",finish_reason="MAX_TOKENS"} 24.0' in text
    assert "inferfleet_engine_output_tokens_total 720.0" in text
    assert "gen_ai_server_time_to_first_token_seconds_count 24.0" in text
    assert await asyncio.to_thread(_get, f"{url}/healthz") == "ok\n"


async def test_a_full_queue_is_refused_with_a_hint(spawn):
    engine = await spawn("--max-num-seqs", "1", "--max-waiting", "1")
    calls = [engine.engine.Run(request(f"r{n}")) for n in range(4)]
    outcomes = [asyncio.ensure_future(refused(call)) for call in calls]
    done, _ = await asyncio.wait(outcomes, return_when=asyncio.FIRST_COMPLETED, timeout=20)
    error = done.pop().result()
    assert isinstance(error, errors.ResourceExhaustedError)
    assert error.reason == "QUEUE_FULL"
    assert error.retry_after_s > 0
    for outcome in outcomes:
        outcome.cancel()
    for call in calls:
        call.cancel()


async def test_a_constraint_that_cannot_be_enforced_is_refused_by_its_name(spawn):
    engine = await spawn()
    constraint = inference_pb2.Constraint(json_schema='{"type": "array", "uniqueItems": true}')
    error = await refused(engine.engine.Run(request("r", constraint=constraint)))
    assert error.violations[0].field == "constraint.json_schema"
    assert error.metadata["keyword"] == "/uniqueItems"


async def test_health_reflection_and_public_service(spawn, tmp_path):
    engine = await spawn("--public")
    health = health_pb2_grpc.HealthStub(engine.channel)
    name = "inferfleet.internal.v1.Engine"
    answer = await health.Check(health_pb2.HealthCheckRequest(service=name))
    assert answer.status == health_pb2.HealthCheckResponse.SERVING
    reflection = reflection_pb2_grpc.ServerReflectionStub(engine.channel)
    listing = reflection_pb2.ServerReflectionRequest(list_services="")
    async for listed in reflection.ServerReflectionInfo(iter([listing])):
        assert name in [s.name for s in listed.list_services_response.service]
    (line,) = [line for line in engine.lines() if line["message"].startswith("public service")]
    async with grpc.aio.insecure_channel(line["message"].split()[-1]) as channel:
        public = inference_pb2_grpc.InferenceStub(channel)
        answer = await public.Complete(
            inference_pb2.GenerateRequest(
                model="fake", text="Hello", stop=inference_pb2.StopParams(max_tokens=5)
            )
        )
        assert answer.summary.usage.prompt_tokens == 5
        assert answer.choices[0].token_ids


async def test_the_front_loads_no_tensors():
    check = "import services.engine.__main__, sys; print('torch' in sys.modules)"
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", check), stdout=asyncio.subprocess.PIPE
    )
    out, _ = await process.communicate()
    assert out == b"False\n"


async def test_a_bad_configuration_is_one_line_and_status_2(tmp_path):
    for flags in (["--model", "/no/such/model"], ["--engine-id", "a/b", "--simulate", "yes"]):
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "services.engine", *flags), stderr=asyncio.subprocess.PIPE
        )
        _, err = await process.communicate()
        assert process.returncode == 2
        plain = [line for line in err.decode().splitlines() if not line.startswith("{")]
        assert len(plain) == 1
        assert plain[0].startswith("python -m services.engine: ")
