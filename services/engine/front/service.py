"""The front process: starts the core, then the services that stand before it; ends in reverse."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable

import grpc
from grpc_health.v1 import health

from inferfleet_proto.internal.v1 import engine_pb2_grpc
from inferfleet_proto.v1 import inference_pb2_grpc
from services.common import rpc
from services.common.config.settings import ConfigError
from services.common.etcd.config import connect
from services.common.service import telemetry
from services.common.service.lifecycle import write_ready
from services.common.service.metrics import MetricsServer
from services.common.text import TextAssets, Tokenizer
from services.common.text.byte_level import byte_assets
from services.engine.contract.core_client import CoreClient
from services.engine.contract.core_link import CoreDiedError
from services.engine.contract.messages import (
    ApplyPlacement,
    CoreReady,
    RoundReport,
    SendSnapshot,
    SetLogLevel,
)
from services.engine.contract.model_config import ModelFileError
from services.engine.front.config import FrontConfig
from services.engine.front.kv_events import KvEventLog, KvEventPublisher, NoKvEvents
from services.engine.front.load_report import LoadBoard
from services.engine.front.metrics import FrontMetrics
from services.engine.front.open_requests import Front
from services.engine.front.placement_member import member_of
from services.engine.front.public_servicer import PublicServicer
from services.engine.front.registration import (
    RegistryEntry,
    engine_id_of,
    engine_info,
    reachable_address,
)
from services.engine.front.request_translation import ModelFacts
from services.engine.front.servicer import EngineServicer, RunCall
from services.engine.front.spans import FrontSpans
from services.engine.model_files import load_text_assets

log = logging.getLogger(__name__)
ENGINE_SERVICE = "inferfleet.internal.v1.Engine"
PUBLIC_SERVICE = "inferfleet.v1.Inference"
_HEALTH_INTERVAL_S = 0.25
_LAST_WORDS_S = 2.0


class EngineServer:
    """An engine's life, as `lifecycle.run` leads it."""

    def __init__(self, config: FrontConfig, core: CoreClient, tracing: telemetry.Telemetry) -> None:
        self._config = config
        self._core = core
        self._tracing = tracing
        self._engine_id = engine_id_of(config)
        reachable_address(config, "")
        self._membership = rpc.Membership.from_config(config)
        # Before the model is loaded: what is wrong with the keys should be said at once.
        self._etcd = connect(config) if config.etcd else None
        self._metrics = FrontMetrics()
        self._board = LoadBoard(
            self._engine_id, epoch_ms=int(time.time() * 1000), stall_s=config.stall_s
        )
        self._exit = contextlib.AsyncExitStack()
        self._front: Front | None = None
        self._entry: RegistryEntry | None = None
        self._healths: list[tuple[health.aio.HealthServicer, str]] = []
        self.address = ""
        self.public_address = ""
        self.metrics_address = ""

    async def start(self) -> None:
        """Load, then listen, then announce.

        Raises:
            ConfigError: a key cannot be used; the core said why it could not start.
        """
        self._exit.callback(self._tracing.close)
        assets = await asyncio.to_thread(_assets, self._config)
        tokenizer = await asyncio.to_thread(Tokenizer, assets)
        ready = await self._start_core()
        await self._start_services(ready, assets, tokenizer)
        write_ready(
            self._config.ready_file,
            service="engine",
            address=self.address,
            metrics_address=self.metrics_address,
        )
        log.info("engine %s serves %s on %s", self._engine_id, ready.model, self.address)

    async def drain(self) -> None:
        """Refuse new work; streams end, or are ended when the grace is over."""
        if self._front is None:
            return
        await self._board.set_draining()
        await self._tell_health()
        if self._entry is not None:
            await self._entry.refresh()
        ended, aborted = await self._front.drain(self._config.drain_grace_s)
        log.info("drained: %d streams ended by themselves, %d were ended", ended, aborted)
        await self._front.wait_closed(_LAST_WORDS_S)

    async def stop(self) -> None:
        """Free everything in reverse order."""
        if self._front is not None:
            self._front.closing()
            # A second signal ends the drain early: these have not been told yet.
            await self._board.set_draining()
            if self._front.cut():
                await self._front.wait_closed(_LAST_WORDS_S)
        await self._exit.aclose()

    async def failed(self) -> str:
        """The core's last words, after every stream has got its end."""
        assert self._front is not None, "not started"
        reason = await self._front.core_failure
        await self._tell_health()
        await self._front.wait_closed(_LAST_WORDS_S)
        return reason

    async def _start_core(self) -> CoreReady:
        log.info("loading %s", self._config.model or "the default model")
        self._exit.push_async_callback(self._core.stop)
        try:
            ready = await self._core.start(self._config)
        except CoreDiedError as error:
            raise ConfigError(f"the core did not start: {error}") from error
        log.info(
            "loaded %s in %.1f s: weights %.0f MiB; %d blocks of %d tokens, %.0f MiB; "
            "longest request %d tokens",
            ready.model,
            ready.load_s,
            ready.weights_bytes / 2**20,
            ready.num_blocks,
            ready.block_size,
            ready.kv_bytes / 2**20,
            ready.max_model_len,
        )
        return ready

    async def _start_services(
        self, ready: CoreReady, assets: TextAssets, tokenizer: Tokenizer
    ) -> None:
        config, engine_id, board = self._config, self._engine_id, self._board
        facts = ModelFacts(
            model=ready.model,
            model_revision=ready.model_revision,
            numerics_id=ready.numerics_id,
            vocab_size=ready.vocab_size,
            max_model_len=ready.max_model_len,
            engine_id=engine_id,
        )
        self._metrics.ready(ready)
        self._level_follows()
        self._front = front = Front(
            self._core,
            facts,
            tokenizer,
            board,
            self._metrics,
            self._kv_events(),
            max_open=config.max_num_seqs + config.max_waiting,
            buffer_tokens=config.stream_buffer_tokens,
            on_report=self._placement(ready),
        )
        self._background(front.pump(), "pump")
        run = RunCall(front, FrontSpans(self._tracing.tracer, facts, board))
        server, self.address = self._bind(config.port, ENGINE_SERVICE, self._membership)
        info = engine_info(
            config,
            ready,
            assets,
            engine_id=engine_id,
            epoch_ms=board.epoch_ms,
            address=reachable_address(config, self.address),
        )
        servicer = EngineServicer(front, run, info, assets)
        engine_pb2_grpc.add_EngineServicer_to_server(servicer, server)
        await self._listen(server)
        self._exit.push_async_callback(servicer.close, _LAST_WORDS_S)
        if config.public:
            await self._start_public(PublicServicer(run, facts, assets, tokenizer))
        self._start_metrics()
        await self._tell_health()
        self._background(self._watch_health(), "health")
        self._entry = RegistryEntry(info, board, self._etcd)
        self._exit.push_async_callback(self._entry.stop)
        await self._entry.start()

    async def _start_public(self, servicer: PublicServicer) -> None:
        server, self.public_address = self._bind(self._config.public_port, PUBLIC_SERVICE, None)
        inference_pb2_grpc.add_InferenceServicer_to_server(servicer, server)
        await self._listen(server)
        log.info("public service on %s", self.public_address)

    def _bind(
        self, port: int, service: str, members: rpc.Membership | None
    ) -> tuple[grpc.aio.Server, str]:
        host = self._config.host
        server = rpc.make_server(membership=members)
        chosen = self._membership.bind(server, f"{host}:{port}", members_only=members is not None)
        self._healths.append((rpc.add_health_and_reflection(server, [service]), service))
        return server, f"{host}:{chosen}"

    async def _listen(self, server: grpc.aio.Server) -> None:
        await server.start()
        self._exit.push_async_callback(server.stop, 1.0)

    def _start_metrics(self) -> None:
        server = MetricsServer(
            self._metrics.registry, lambda: self._serving, self._membership.token
        )
        self.metrics_address = server.start(self._config.host, self._config.metrics_port)
        self._exit.callback(server.stop)

    def _level_follows(self) -> None:
        """The core logs as the front does; it starts at info."""
        loop = asyncio.get_running_loop()

        def follow(level: str) -> None:
            loop.call_soon_threadsafe(self._core.send, [SetLogLevel(level=level)])

        if telemetry.log_level() != "info":
            follow(telemetry.log_level())
        self._exit.callback(telemetry.follow_log_level(follow))

    def _kv_events(self) -> KvEventPublisher | NoKvEvents:
        if not self._config.kvcache:
            return NoKvEvents()
        events = KvEventLog(self._engine_id, self._board.epoch_ms)
        self._metrics.watch_kv_events(events)
        publisher = KvEventPublisher(
            self._config.kvcache,
            self._membership,
            events,
            ask_core=lambda: self._core.send([SendSnapshot()]),
        )
        publisher.start()
        self._exit.push_async_callback(publisher.stop)
        return publisher

    def _placement(self, ready: CoreReady) -> Callable[[RoundReport], None] | None:
        member = member_of(
            self._config,
            ready,
            self._engine_id,
            lambda placement: self._core.send([ApplyPlacement(placement=placement)]),
        )
        if member is None:
            return None
        self._background(member.run(), "placement")
        return member.take

    @property
    def _serving(self) -> bool:
        front = self._front
        alive = front is not None and not front.core_failure.done()
        return alive and not self._board.draining and not self._board.stalled

    @property
    def _state(self) -> tuple[bool, bool, int]:
        return self._serving, self._board.draining, self._board.placement_version

    async def _tell_health(self) -> None:
        for servicer, name in self._healths:
            await rpc.set_health(servicer, [name], serving=self._serving)

    async def _watch_health(self) -> None:
        """Health and the registry follow the core's progress, a drain by anyone, a new map."""
        told = self._state
        while True:
            await asyncio.sleep(_HEALTH_INTERVAL_S)
            now = self._state
            if now != told:
                if now[0] != told[0]:
                    log.info("health: %s", "serving" if now[0] else "not serving")
                await self._tell_health()
                if self._entry is not None:
                    await self._entry.refresh()
            told = now

    def _background(self, work: "asyncio._CoroutineLike[None]", name: str) -> None:
        task = asyncio.create_task(work, name=name)
        task.add_done_callback(self._crashed)
        self._exit.push_async_callback(_cancelled, task)

    def _crashed(self, task: "asyncio.Task[None]") -> None:
        """A part that the engine cannot do without has failed: end, to be started again."""
        if task.cancelled() or task.exception() is None:
            return
        log.critical("%s failed", task.get_name(), exc_info=task.exception())
        if self._front is not None:
            self._front.core_died(f"{task.get_name()} failed")


async def _cancelled(task: "asyncio.Task[None]") -> None:
    task.cancel()
    await asyncio.wait({task})


def _assets(config: FrontConfig) -> TextAssets:
    if config.simulate:
        return byte_assets()
    try:
        return load_text_assets(config.model)
    except ModelFileError as error:
        raise ConfigError(str(error)) from error
