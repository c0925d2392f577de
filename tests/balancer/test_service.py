"""The balancer with engines and itself in real processes: kills, stops, drains, etcd."""

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import urllib.request

import grpc
import pytest
from google.protobuf import json_format
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from opentelemetry.sdk.trace import TracerProvider

from inferfleet_proto.admin.v1 import fleet_pb2, fleet_pb2_grpc
from inferfleet_proto.internal.v1 import engine_pb2_grpc
from services.balancer.config import BalancerConfig
from services.balancer.service import BalancerService
from services.common import errors
from services.common.config.settings import ConfigError
from services.common.etcd.client import Etcd
from services.common.etcd.registry import BALANCERS_PREFIX, ENGINES_PREFIX
from services.common.rpc import ENGINE_ID_KEY, TOKEN_KEY, Membership
from services.common.rpc.metadata import PROOF_KEY
from services.common.service.telemetry import Telemetry
from tests.doubles.fake_engine import FakeEngine
from tests.doubles.registry import FakeRegistry


async def join(fleet, *processes):
    for process in processes:
        value = json_format.MessageToJson(process.info).encode()
        await fleet.keys.set(ENGINES_PREFIX + process.info.engine_id, value)
    for process in processes:
        await fleet.until_state(process.info.engine_id, "serving")


async def partly_read(fleet, request):
    """A stream after its third message, and the engine it comes from."""
    call = fleet.run(request)
    messages = [await call.read() for _ in range(3)]
    return call, messages, dict(await call.initial_metadata())[ENGINE_ID_KEY]


async def rest(call, messages=()):
    """The stream to its end; raises what it ends with."""
    messages = list(messages)
    while (message := await call.read()) is not grpc.aio.EOF:
        messages.append(message)
    assert await call.code() is grpc.StatusCode.OK
    return messages


@pytest.mark.parametrize(
    ("fleet", "how"),
    [({}, signal.SIGKILL), ({"stall_limit_s": 1.5}, signal.SIGSTOP)],
    indirect=["fleet"],
)
async def test_streams_survive_their_engine(
    fleet, start_engine_process, engine_request, as_seen, undisturbed, how
):
    processes = {name: start_engine_process(name) for name in ("a", "b")}
    await join(fleet, *processes.values())
    requests = [engine_request(request_id=f"r{i}", seed=i, max_tokens=100) for i in range(8)]
    reads = await asyncio.gather(*(partly_read(fleet, request) for request in requests))
    victims = [engine for _, _, engine in reads]
    victim = max(set(victims), key=victims.count)
    processes[victim].signal(how)
    streams = await asyncio.gather(*(rest(call, messages) for call, messages, _ in reads))
    for request, stream, engine in zip(requests, streams, victims, strict=True):
        assert as_seen(stream) == undisturbed(request)
        assert stream[-1].summary.continuations == (1 if engine == victim else 0)
    if how == signal.SIGSTOP:
        processes[victim].signal(signal.SIGCONT)
        await fleet.until_state(victim, "serving")
    await fleet.until_idle()
    carried = fleet.metric("inferfleet_balancer_continuations_total", outcome="carried")
    assert carried == victims.count(victim)


@pytest.mark.verify
@pytest.mark.timeout(400)
async def test_twenty_kills_under_load_change_nothing(
    fleet, start_engine_process, engine_request, as_seen, undisturbed
):
    """32 streams at all times, 3 engines, one killed and started anew 20 times."""
    names = ["a", "b", "c"]
    processes = {name: start_engine_process(name) for name in names}
    await join(fleet, *processes.values())
    done, over = [], asyncio.Event()

    async def client(number):
        served = 0
        while not over.is_set():
            seed, served = number * 1000 + served, served + 1
            request = engine_request(request_id=f"r{seed}", seed=seed, max_tokens=60)
            messages = await fleet.ask(request)
            assert as_seen(messages) == undisturbed(request)
            done.append(messages[-1].summary)

    clients = [asyncio.create_task(client(number)) for number in range(32)]
    for kill in range(20):
        name = names[kill % 3]
        processes[name].signal(signal.SIGKILL)
        await fleet.until_state(name, "unreachable")
        processes[name] = await asyncio.to_thread(
            start_engine_process, name, "--epoch-ms", str(kill + 2)
        )
        await join(fleet, processes[name])
    over.set()
    await asyncio.gather(*clients)
    assert all(summary.exact for summary in done)
    assert sum(summary.continuations for summary in done) >= 20
    await fleet.until_idle()


@pytest.mark.parametrize("fleet", [{"engine_headroom": 0, "queue_size": 2}], indirect=True)
async def test_the_queue_over_the_wire(fleet, engine_request, wait_until):
    engine = await fleet.add("a", max_num_seqs=1)
    engine.hang_after = 1
    running = fleet.run(engine_request(request_id="running"))
    await running.read()
    waiting = [fleet.run(engine_request(request_id=f"w{i}", priority=i)) for i in range(2)]
    reads = [asyncio.create_task(call.read()) for call in waiting]
    admission = fleet.admission
    await wait_until(lambda: admission.queued() == {"tiny": 2}, "both wait")
    assert fleet.metric("inferfleet_balancer_queue_length", model="tiny") == 2
    with pytest.raises(Exception, match="queue of model tiny is full") as full:
        await fleet.ask(engine_request(request_id="w9"))
    assert full.value.retry_after_s > 0
    running.cancel()
    engine.hang_after = None
    await asyncio.gather(*reads)
    for call in waiting:
        await rest(call)
    assert [r.request.request_id for r in engine.requests] == ["running", "w1", "w0"]
    await fleet.until_idle()


@pytest.mark.parametrize("fleet", [{"engine_headroom": 0}], indirect=True)
async def test_a_deadline_in_the_queue_never_reaches_an_engine(fleet, engine_request):
    engine = await fleet.add("a", max_num_seqs=1)
    engine.hang_after = 1
    running = fleet.run(engine_request(request_id="running"))
    await running.read()
    with pytest.raises(Exception, match=r"(?i)deadline"):
        await fleet.ask(engine_request(request_id="late"), timeout=0.2)
    running.cancel()
    await fleet.until_idle()
    assert [r.request.request_id for r in engine.requests] == ["running"]


async def test_health_reflection_and_metrics(fleet):
    kinds = health_pb2.HealthCheckResponse
    async with grpc.aio.insecure_channel(fleet.service.address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        request = health_pb2.HealthCheckRequest(service="inferfleet.internal.v1.Engine")
        watch = health.Watch(request)
        # Without an engine that serves it takes no work, though the process is well.
        while (await watch.read()).status != kinds.NOT_SERVING:
            pass
        assert (await health.Check(health_pb2.HealthCheckRequest())).status == kinds.SERVING
        engine = await fleet.add("a")
        assert (await watch.read()).status == kinds.SERVING
        await engine.stop()
        assert (await watch.read()).status == kinds.NOT_SERVING
        watch.cancel()
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        ask = reflection_pb2.ServerReflectionRequest(list_services="")
        async for reply in stub.ServerReflectionInfo(iter([ask])):
            names = {s.name for s in reply.list_services_response.service}
    assert "inferfleet.internal.v1.Engine" in names
    url = f"http://{fleet.service.metrics_address}"
    text = (await asyncio.to_thread(urllib.request.urlopen, f"{url}/metrics")).read().decode()
    assert "inferfleet_balancer_breaker_state" in text


async def test_only_members_are_served(make_fleet, tmp_path, engine_request):
    secret = tmp_path / "token"
    secret.write_text("s3cret\n")
    fleet = await make_fleet(fleet_token_file=str(secret))
    engine = await fleet.add("a", Membership(token="s3cret"))
    with pytest.raises(errors.PermissionDeniedError):
        await fleet.ask(engine_request())
    with pytest.raises(grpc.RpcError) as refused:
        await fleet.admin().ListEngines(fleet_pb2.ListEnginesRequest())
    assert refused.value.code() is grpc.StatusCode.PERMISSION_DENIED
    await fleet.ask(engine_request(), metadata=((TOKEN_KEY, "s3cret"),))
    assert TOKEN_KEY not in engine.carrier_metadata[0]
    assert engine.carrier_metadata[0][PROOF_KEY], "what the balancer shows to engines instead"


async def test_an_engine_that_a_stranger_registers_gets_nothing(make_fleet, tmp_path):
    secret = tmp_path / "token"
    secret.write_text("s3cret\n")
    fleet = await make_fleet(fleet_token_file=str(secret))
    stranger = FakeEngine("stranger")
    fleet.engines.append(stranger)
    await stranger.start()
    await fleet.keys.register(stranger)
    await fleet.until_state("stranger", "unreachable")
    await fleet.member("stranger").link.peer._lock.acquire()  # after its challenge
    assert stranger.metadata + stranger.carrier_metadata == []


@pytest.mark.parametrize(
    "fleet", [{"engine_headroom": 0, "queue_size": 20, "carry_on_wait_s": 0.2}], indirect=True
)
async def test_all_counts_are_exact_after_chaos(fleet, engine_request):
    """Clients that leave, deadlines, refusals, cuts and a full queue, all at once."""
    engines = [await fleet.add(f"e{i}", max_num_seqs=4) for i in range(3)]
    for engine in engines:
        engine.token_delay_s = 0.005
    rng = random.Random(11)

    async def one(number):
        request = engine_request(request_id=f"r{number}", tenant=f"t{number % 3}", seed=number)
        call = fleet.run(request, timeout=rng.choice([None, 0.02, 0.2, 5]))
        try:
            for _ in range(rng.choice([1, 3, 99])):
                if await call.read() is grpc.aio.EOF:
                    return
        except grpc.RpcError:
            return
        finally:
            call.cancel()

    async def misbehave():
        while True:
            engine = rng.choice(engines)
            engine.break_after = rng.choice([None, 0, 1, 3])
            engine.break_with = rng.choice([None, errors.InternalError("bug")])
            engine.refuse_with = rng.choice([None, None, errors.ResourceExhaustedError("full")])
            await asyncio.sleep(0.02)

    trouble = asyncio.create_task(misbehave())
    for wave in range(4):
        await asyncio.gather(*(one(wave * 40 + i) for i in range(40)))
    trouble.cancel()
    await fleet.until_idle()
    ended = fleet.service.dependencies.metrics.requests.collect()[0].samples
    assert sum(s.value for s in ended if s.name.endswith("_total")) <= 160
    for engine in engines:
        engine.break_after = engine.refuse_with = None
        await fleet.until_state(engine.info.engine_id, "serving")
    await fleet.ask(engine_request(request_id="after"))


async def test_a_drain_lets_streams_end_and_takes_no_more(fleet, engine_request, wait_until):
    engine = await fleet.add("a")
    engine.token_delay_s = 0.05
    call = fleet.run(engine_request(max_tokens=10))
    await call.read()
    draining = asyncio.create_task(fleet.service.drain())
    await wait_until(lambda: fleet.service.servicer.draining, "draining")
    with pytest.raises(Exception, match="draining") as refused:
        await fleet.ask(engine_request(request_id="r2"))
    assert refused.value.retry_after_s > 0
    messages = await rest(call)
    assert messages[-1].HasField("summary")
    await draining


@pytest.mark.parametrize("messages", [0, 3])
async def test_streams_that_outlive_the_grace_end_with_a_status(
    make_fleet, engine_request, wait_until, messages
):
    fleet = await make_fleet(drain_grace_s=0.05)
    engine = await fleet.add("a")
    engine.token_delay_s = 0.05 if messages else 60
    call = fleet.run(engine_request(max_tokens=1000))
    for _ in range(messages):
        await call.read()
    await wait_until(lambda: fleet.in_flight() == 1, "the engine has it")
    await fleet.service.drain()
    stopped = asyncio.create_task(fleet.service.stop())
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await rest(call)
    await stopped
    error = errors.error_of(caught.value)
    assert isinstance(error, errors.UnavailableError), "the gateway may resume it"
    assert (error.reason, error.retry_after_s) == ("DRAINING", 1)
    assert (int(error.metadata["completion_tokens"]) > 0) == bool(messages)
    await wait_until(lambda: engine.running == 0, "the engine has ended it")


async def test_requests_that_wait_for_an_engine_end_with_a_status(
    make_fleet, engine_request, wait_until
):
    fleet = await make_fleet(drain_grace_s=0.05, patience_s=60.0)
    call = fleet.run(engine_request())
    await wait_until(lambda: fleet.service.servicer.running, "it has arrived")
    await fleet.service.drain()
    stopped = asyncio.create_task(fleet.service.stop())
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await rest(call)
    await stopped
    assert errors.error_of(caught.value).reason == "DRAINING"


def start_balancer(etcd_endpoint, path, *flags):
    command = [sys.executable, "-m", "services.balancer", "--etcd", etcd_endpoint]
    command += ["--ready-file", str(path), "--balancer-id", "b1", *flags]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True)


@pytest.mark.services
async def test_the_process_with_a_real_etcd(
    start_etcd, tmp_path, start_engine_process, engine_request, as_seen, undisturbed, wait_until
):
    server = start_etcd()
    ready = tmp_path / "ready.json"
    engine = start_engine_process("a")
    etcd = Etcd([server.address])
    lease = await etcd.grant_lease(60)
    value = json_format.MessageToJson(engine.info).encode()
    await etcd.put(ENGINES_PREFIX + "a", value, lease=lease)
    balancer = start_balancer(server.address, ready, "--host", "0.0.0.0")
    try:
        await wait_until(ready.exists, "the balancer is ready")
        address = json.loads(ready.read_text())["address"]
        listing = None
        while not listing:
            await asyncio.sleep(0.02)
            listing = (await etcd.get_prefix(BALANCERS_PREFIX)).items
        record = json.loads(listing[BALANCERS_PREFIX + "b1"].value)
        assert record["address"] == address
        assert address.startswith("127.0.0.1:")  # towards this etcd
        async with grpc.aio.insecure_channel(record["admin_address"]) as channel:
            fleet_view = await fleet_pb2_grpc.FleetStub(channel).ListEngines(
                fleet_pb2.ListEnginesRequest()
            )
        assert [view.info.engine_id for view in fleet_view.engines] == ["a"]
        async with grpc.aio.insecure_channel(address) as channel:
            stub = engine_pb2_grpc.EngineStub(channel)
            request = engine_request()
            assert as_seen([m async for m in stub.Run(request)]) == undisturbed(request)
            # etcd loses everything; the engine still reports, so it stays.
            await etcd.revoke_lease(lease)
            assert as_seen([m async for m in stub.Run(request)]) == undisturbed(request)
            server.kill()
            assert as_seen([m async for m in stub.Run(request)]) == undisturbed(request)
            slow = stub.Run(engine_request(max_tokens=20))
            await slow.read()
            os.kill(balancer.pid, signal.SIGTERM)
            messages = await rest(slow)
            assert messages[-1].HasField("summary")
        assert await asyncio.to_thread(balancer.wait, 20) == 0
    finally:
        balancer.kill()
        balancer.wait()
        balancer.stderr.close()
        await etcd.close()


def test_a_wrong_setting_is_named():
    for flags, name in (
        ([], "etcd"),
        (["--etcd", "nowhere"], "etcd"),
        (["--policy", "x"], "policy"),
    ):
        command = [sys.executable, "-m", "services.balancer", *flags]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
        assert done.returncode == 2
        assert f"{name}:" in done.stderr
        assert len(done.stderr.strip().splitlines()) == 1


async def test_a_failed_start_frees_everything_and_stop_is_idempotent(fleet):
    """The admin port is taken, so the start fails after the Engine service listens."""
    port = int(fleet.service.admin_address.rpartition(":")[2])
    telemetry = Telemetry(TracerProvider(shutdown_on_exit=False))
    tasks = asyncio.all_tasks()
    service = BalancerService(BalancerConfig(admin_port=port), telemetry, FakeRegistry())
    with pytest.raises(ConfigError):
        await service.start()
    async with grpc.aio.insecure_channel(service.address) as channel:
        await service.stop()
        await service.stop()
        with pytest.raises(grpc.RpcError):
            await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
    left = {task.get_name() for task in asyncio.all_tasks() - tasks}
    assert not left & {"engine records", "engine sweep", "health"}


async def test_a_background_task_that_ends_is_the_services_failure(fleet, monkeypatch):
    registry = fleet.service.dependencies.registry
    monkeypatch.setattr(registry, "_sweep", lambda: 1 / 0)
    reason = await asyncio.wait_for(fleet.service.failed(), 20)
    assert "engine sweep" in reason
    assert "ZeroDivisionError" in reason
