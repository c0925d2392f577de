"""Two revisions behind one name: real etcd, two gateways, two balancers, engines on sockets."""

import asyncio
import contextlib
import json
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import json_format
from opentelemetry.sdk.trace import TracerProvider

from inferfleet_cli.main import main
from inferfleet_proto.v1 import inference_pb2, inference_pb2_grpc
from services.balancer.config import BalancerConfig
from services.balancer.service import BalancerService
from services.common.etcd.client import Etcd
from services.common.etcd.model_alias import MODELS_PREFIX
from services.common.etcd.registry import ENGINES_PREFIX
from services.common.service.telemetry import Telemetry
from services.common.text.byte_level import byte_assets
from services.gateway.config import GatewayConfig
from services.gateway.models.alias_table import AliasTable
from services.gateway.service import GatewayService
from tests.doubles.fake_engine import MODEL, FakeEngine

OLD, NEW = "r1", "r2"


async def until(condition: Callable[[], bool]) -> None:
    """Wait for a condition, with a generous limit."""
    end = time.monotonic() + 40
    while not condition():
        assert time.monotonic() < end, "not within 40 s"
        await asyncio.sleep(0.01)


class TextEngine(FakeEngine):
    """A fake engine that gives its tokenizer too."""

    async def GetTokenizer(self, request: Any, context: Any) -> AsyncIterator[Any]:
        for chunk in byte_assets().chunks(4096):
            yield chunk


class Fleet:
    """Everything in this process but etcd."""

    def __init__(self, endpoint: str, folder: Path) -> None:
        self.endpoint = endpoint
        self.folder = folder
        self.etcd = Etcd([endpoint])
        self.engines: dict[str, TextEngine] = {}
        self.balancers: list[BalancerService] = []
        self.gateways: list[GatewayService] = []
        self.addresses: list[str] = []
        self._channels: list[grpc.aio.Channel] = []

    async def start(self) -> None:
        for revision in (OLD, NEW):
            await self.add(f"engine-{revision}", revision)
        for number in range(2):
            config = BalancerConfig(
                etcd=(self.endpoint,), balancer_id=f"b{number}", patience_s=0.2, log_level="error"
            )
            self.balancers.append(
                BalancerService(config, Telemetry(TracerProvider(shutdown_on_exit=False)))
            )
            await self.balancers[-1].start()
        for number in range(2):
            ready = self.folder / f"gateway-{number}"
            keys = {"etcd": (self.endpoint,), "port": 0, "http_port": 0, "log_level": "error"}
            self.gateways.append(
                GatewayService(
                    GatewayConfig(ready_file=str(ready), **keys),
                    Telemetry(TracerProvider(shutdown_on_exit=False)),
                )
            )
            await self.gateways[-1].start()
            self.addresses.append(json.loads(ready.read_text())["address"])

    async def add(self, engine_id: str, revision: str) -> TextEngine:
        engine = TextEngine(
            engine_id,
            model_revision=revision,
            numerics_id=f"n-{revision}",
            hash_namespace=revision.encode(),
            tokenizer_digest=byte_assets().digest,
            vocab_size=300,
            max_num_seqs=64,
        )
        self.engines[engine_id] = engine
        await engine.start()
        await self.register(engine)
        return engine

    async def register(self, engine: TextEngine) -> None:
        value = json_format.MessageToJson(engine.info).encode()
        await self.etcd.put(ENGINES_PREFIX + engine.info.engine_id, value)

    async def stop(self) -> None:
        for channel in self._channels:
            await channel.close()
        for service in (*self.gateways, *self.balancers):
            await service.stop()
        for engine in self.engines.values():
            await engine.stop()
        await self.etcd.close()

    def stub(self, number: int) -> Any:
        self._channels.append(grpc.aio.insecure_channel(self.addresses[number]))
        return inference_pb2_grpc.InferenceStub(self._channels[-1])

    async def command(self, *words: str) -> int:
        """Run `inferfleet models ...` as a person would, in a thread of its own."""
        return await asyncio.to_thread(main, ["models", *words, "--etcd", self.endpoint])

    def tables(self) -> list[AliasTable]:
        """The alias table of each gateway."""
        return [gateway._running.catalog.table for gateway in self.gateways]

    async def until_version(self, alias: str, version: int) -> None:
        for table in self.tables():
            await until(
                lambda table=table: version == getattr(table.records.get(alias), "version", 0)
            )


def request(alias: str, number: Any, *, session: str = "", tokens: int = 2) -> Any:
    return inference_pb2.GenerateRequest(
        model=alias,
        request_id=f"r{number}",
        text="a prompt of some length",
        stop=inference_pb2.StopParams(max_tokens=tokens),
        routing=inference_pb2.RoutingHints(session_id=session),
    )


async def engine_of(call: Any) -> str:
    """Which engine gave the whole of an answer."""
    names = set()
    async for message in call:
        kind = message.WhichOneof("event")
        if kind in ("started", "summary"):
            names.add(getattr(message, kind).engine_id)
    assert len(names) == 1, "a stream stays at its revision"
    return str(names.pop())


@pytest.fixture
async def fleet(start_etcd, tmp_path) -> AsyncIterator[Fleet]:
    made = Fleet(start_etcd().address, tmp_path)
    try:
        await made.start()
        yield made
    finally:
        await made.stop()


async def test_shares_follow_the_weights_and_both_gateways_agree(fleet):
    assert await fleet.command("set", "chat", f"{MODEL}@{OLD}=90", f"{MODEL}@{NEW}=10") == 0
    await fleet.until_version("chat", 1)
    stubs = [fleet.stub(0), fleet.stub(1)]
    calls = [[engine_of(stub.Generate(request("chat", n))) for n in range(150)] for stub in stubs]
    first, second = [await asyncio.gather(*pending) for pending in calls]
    assert first == second, "the same id goes to the same revision at every gateway"
    counts = Counter(first)
    assert 4 <= counts[f"engine-{NEW}"] <= 30, counts
    one_session = [
        engine_of(stubs[n % 2].Generate(request("chat", f"s{n}", session="s7"))) for n in range(12)
    ]
    assert len(set(await asyncio.gather(*one_session))) == 1
    listed = (await stubs[0].ListModels(inference_pb2.ListModelsRequest())).models
    shares = {m.name: {r.revision: r.share for r in m.revisions} for m in listed}
    assert shares["chat"] == pytest.approx({OLD: 0.9, NEW: 0.1})
    assert set(shares[MODEL]) == {OLD, NEW}, "both revisions of the model are listed"
    exact = [engine_of(stubs[0].Generate(request(f"{MODEL}@{NEW}", f"x{n}"))) for n in range(5)]
    assert set(await asyncio.gather(*exact)) == {f"engine-{NEW}"}


async def test_promote_and_drain_under_load_fail_nothing(fleet):
    await fleet.command("set", MODEL, f"{MODEL}@{OLD}")
    await fleet.command("canary", MODEL, f"{MODEL}@{NEW}", "--percent", "5")
    await fleet.until_version(MODEL, 2)
    old, new = fleet.engines[f"engine-{OLD}"], fleet.engines[f"engine-{NEW}"]
    old.token_delay_s = new.token_delay_s = 0.01
    stubs, served, going = [fleet.stub(0), fleet.stub(1)], [], True

    async def client(name: int) -> None:
        number = 0
        while going:
            call = stubs[name % 2].Generate(request(MODEL, f"{name}-{number}", tokens=8))
            served.append(await engine_of(call))
            number += 1

    clients = [asyncio.create_task(client(name)) for name in range(16)]
    try:
        await until(lambda: len(served) > 100)
        assert await fleet.command("drain", f"{MODEL}@{OLD}", "--grace", "20") == 1, "still in use"
        assert await fleet.command("promote", MODEL, f"{MODEL}@{NEW}", "--if-version", "2") == 0
        # At once, before every gateway has the new record: no request may fail because of that.
        assert await fleet.command("drain", f"{MODEL}@{OLD}", "--grace", "20") == 0
        assert old.load.draining
        at = len(served)
        await until(lambda: len(served) > at + 100)
        going = False
        await asyncio.gather(*clients)  # raises what any request failed with
    finally:
        for task in clients:
            task.cancel()
        await asyncio.gather(*clients, return_exceptions=True)
    assert Counter(served[:100])[f"engine-{OLD}"] > 75, "a canary of 5 % before"
    assert set(served[at + 50 :]) == {f"engine-{NEW}"}, "and the new one alone after"


async def test_a_revision_that_dies_gives_its_share_to_the_others(fleet):
    await fleet.command("set", "chat", f"{MODEL}@{OLD}=1", f"{MODEL}@{NEW}=1")
    await fleet.until_version("chat", 1)
    await fleet.engines[f"engine-{NEW}"].stop()
    calls = [engine_of(fleet.stub(0).Generate(request("chat", n))) for n in range(20)]
    assert set(await asyncio.gather(*calls)) == {f"engine-{OLD}"}
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await engine_of(fleet.stub(0).Generate(request(f"{MODEL}@{NEW}", "x")))
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE, (
        "a request that names a revision gets no other"
    )


async def test_a_bad_record_is_refused_and_the_last_good_one_stays(fleet, capsys):
    await fleet.command("set", "chat", f"{MODEL}@{OLD}")
    await fleet.until_version("chat", 1)
    await fleet.etcd.put(MODELS_PREFIX + "chat", b'{"version": 2, "targets": []}')
    table = fleet.tables()[0]
    await until(lambda: "chat" in table.problems)
    assert table.problems["chat"].startswith("targets: ")
    assert await engine_of(fleet.stub(0).Generate(request("chat", 1))) == f"engine-{OLD}"
    await fleet.command("list")
    assert "chat: gateways ignore the record: targets: must name 1" in capsys.readouterr().out
    assert await fleet.command("set", "chat", f"{MODEL}@{NEW}") == 0, "and is mended by `set`"
    await until(lambda: not table.problems)
    assert await engine_of(fleet.stub(0).Generate(request("chat", 2))) == f"engine-{NEW}"


async def test_an_emptied_store_gets_its_records_again(fleet):
    await fleet.command("set", "chat", f"{MODEL}@{NEW}")
    await fleet.until_version("chat", 1)
    key = MODELS_PREFIX + "chat"
    kept = await fleet.etcd.get(key)
    await fleet.etcd.delete(key)
    back, end = None, time.monotonic() + 40
    while back is None:
        assert time.monotonic() < end, "no gateway wrote it again"
        await asyncio.sleep(0.02)
        back = await fleet.etcd.get(key)
    assert back.value == kept.value
    assert await engine_of(fleet.stub(0).Generate(request("chat", 1))) == f"engine-{NEW}"
    await fleet.command("set", "chat", "--delete")
    await until(lambda: all("chat" not in table.records for table in fleet.tables()))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await engine_of(fleet.stub(0).Generate(request("chat", 2)))
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_commands_teach_and_refuse(fleet, capsys):
    command = fleet.command
    assert await command("set", "chat", f"{MODEL}@r") == 2, "two revisions begin so"
    assert await command("set", "chat", f"{MODEL}@r9") == 3
    assert await command("set", "chat", MODEL) == 2
    assert await command("set", "chat", f"{MODEL}@{OLD}=x") == 2
    assert await command("set", "chat", f"{MODEL}@{OLD}=0") == 2
    assert await command("set", "chat") == 2
    assert await command("rollback", "chat") == 3
    assert await command("canary", "chat", f"{MODEL}@{NEW}", "--percent", "80") == 2
    output = capsys.readouterr().err
    assert f"{MODEL}@{OLD}, {MODEL}@{NEW}" in output
    assert "targets: no weight is above 0" in output
    assert await command("set", "chat", f"{MODEL}@{OLD}", "--if-version", "0") == 0
    assert await command("promote", "chat", f"{MODEL}@{NEW}", "--if-version", "7") == 4
    assert await command("promote", "chat", f"{MODEL}@{NEW}") == 0
    assert await command("rollback", "chat") == 0
    assert await command("list") == 0
    output = capsys.readouterr().out
    assert "chat, version 3:\n  100.00%  tiny@r1" in output
    assert [line.split() for line in output.splitlines() if line.startswith("chat  ")] == [
        ["chat", "tiny@r1", "1", "100.00%", "3"]
    ]
    assert await command("set", "chat", "--delete") == 0
    assert await command("set", "chat", "--delete") == 3
    with contextlib.suppress(SystemExit):
        await command("canary", "--help")
    assert "sessions move to the canary only" in " ".join(capsys.readouterr().out.split())
