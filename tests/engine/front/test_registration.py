import asyncio
from types import SimpleNamespace

import pytest
from google.protobuf import json_format
from grpc_health.v1 import health_pb2, health_pb2_grpc

from inferfleet_proto.internal.v1 import engine_pb2
from services.common.config.settings import ConfigError
from services.common.etcd.client import Etcd
from services.common.etcd.registry import ENGINES_PREFIX
from services.engine.contract.runner import StateBlock
from services.engine.front.config import FrontConfig
from services.engine.front.registration import RegistryEntry, choose_engine_id, engine_info


def test_the_name_can_be_a_key():
    assert choose_engine_id(FrontConfig(engine_id="engine-1.a_B")) == "engine-1.a_B"
    assert choose_engine_id(FrontConfig()) != choose_engine_id(FrontConfig())
    for bad in ("a/b", "Ж", "-a", "x" * 65):
        with pytest.raises(ConfigError, match="engine_id"):
            choose_engine_id(FrontConfig(engine_id=bad))


@pytest.mark.parametrize(
    ("mode", "compiled", "registered"),
    [(False, False, False), (False, True, True), (True, False, True)],
)
def test_compiled_rounds_are_registered_as_deterministic(mode, compiled, registered):
    info = SimpleNamespace(
        model="m",
        model_revision="r",
        numerics_id="n",
        vocab_size=9,
        eos_token_ids=(1,),
        bit_identical=compiled,
        state=StateBlock(8, 4) if compiled else None,
    )
    ready = SimpleNamespace(
        info=info,
        hash_namespace=b"n",
        block_size=4,
        num_blocks=9,
        max_model_len=9,
        max_num_seqs=3,
    )
    record = engine_info(
        FrontConfig(deterministic=mode),
        ready,
        SimpleNamespace(digest="d"),
        engine_id="e",
        epoch_ms=1,
        address="h:1",
    )
    assert record.deterministic is registered
    assert record.max_num_seqs == 3, "as many as the core can run, not as configured"
    assert record.needs_state is compiled, "a balancer asks the index for snapshots too"


async def _entry(etcd, key, holds):
    async with asyncio.timeout(20):
        while True:
            found = await etcd.get(key)
            if found is None:
                info = None
            else:
                info = json_format.Parse(found.value, engine_pb2.EngineInfo())
            if holds(info):
                return info
            await asyncio.sleep(0.05)


@pytest.mark.services
async def test_the_entry_in_etcd_follows_the_engine(start_front, etcd_endpoint):
    front = await start_front(etcd=(etcd_endpoint,), engine_id="registered", advertise="host:1")
    etcd = Etcd([etcd_endpoint])
    key = f"{ENGINES_PREFIX}registered"
    info = await _entry(etcd, key, lambda info: info is not None)
    assert (info.engine_id, info.address, info.model) == ("registered", "host:1", "tiny")
    assert (info.block_size, info.hash_namespace, info.role) == (4, b"n" * 32, "both")
    assert await front.engine.GetInfo(engine_pb2.GetInfoRequest()) == info
    await front.engine.Drain(engine_pb2.DrainRequest())
    await _entry(etcd, key, lambda info: info is not None and info.draining)
    await front.server.stop()
    await _entry(etcd, key, lambda info: info is None)
    await etcd.close()


async def test_an_etcd_that_is_away_changes_nothing(start_front):
    front = await start_front(etcd=("127.0.0.1:1",), kvcache="127.0.0.1:1")
    health = health_pb2_grpc.HealthStub(front.channel)
    answer = await health.Check(health_pb2.HealthCheckRequest())
    assert answer.status == health_pb2.HealthCheckResponse.SERVING
    assert (await front.engine.GetInfo(engine_pb2.GetInfoRequest())).engine_id


async def test_health_follows_a_drain_and_a_stall(start_front, run_request):
    front = await start_front(stall_s=1.0)
    health = health_pb2_grpc.HealthStub(front.channel)
    kinds = health_pb2.HealthCheckResponse
    watch = health.Watch(health_pb2.HealthCheckRequest(service="inferfleet.internal.v1.Engine"))
    assert (await watch.read()).status == kinds.SERVING
    stuck = front.engine.Run(run_request())
    async with asyncio.timeout(20):
        assert (await watch.read()).status == kinds.NOT_SERVING
        front.core.say()  # a round: it goes on
        assert (await watch.read()).status == kinds.SERVING
        stuck.cancel()
        await front.engine.Drain(engine_pb2.DrainRequest())
        while (await watch.read()).status != kinds.NOT_SERVING:
            pass
    watch.cancel()


async def test_a_bad_etcd_address_is_a_configuration_error(start_front):
    with pytest.raises(ConfigError, match="etcd"):
        await start_front(etcd=("http://",))


async def test_a_standby_does_not_register_while_it_stops(start_front, tmp_path, monkeypatch):
    path, calls = tmp_path / "in-use", []

    async def start(self):
        calls.append("start")

    async def stop(self):
        calls.append("stop")
        path.touch()  # the supervisor wants it now
        await asyncio.sleep(0.2)

    monkeypatch.setattr(RegistryEntry, "start", start)
    monkeypatch.setattr(RegistryEntry, "stop", stop)
    front = await start_front(standby_file=str(path))
    await front.server.stop()
    assert calls == ["stop"]
