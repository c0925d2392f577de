"""The front process of an engine: starts the core, then the services in front of it."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from pathlib import Path

import grpc

from inferfleet_proto.internal.v1 import engine_pb2_grpc
from inferfleet_proto.v1 import inference_pb2_grpc
from services.common import rpc
from services.common.config.settings import ConfigError
from services.common.etcd.config import connect
from services.common.service import telemetry
from services.common.service.advertise import advertised_address
from services.common.service.background import Background
from services.common.service.lifecycle import never, write_ready
from services.common.service.metrics import MetricsServer
from services.common.tasks import cancel_and_wait
from services.common.text import TextAssets, Tokenizer
from services.common.text.byte_level import byte_assets
from services.engine.contract.core_client import CoreClient
from services.engine.contract.core_link import CoreDiedError, CoreLink
from services.engine.contract.messages import (
    ApplyPlacement,
    CoreReady,
    RoundReport,
    SendSnapshot,
    SetLogLevel,
)
from services.engine.contract.model_config import ModelFileError
from services.engine.front.config import FrontConfig
from services.engine.front.health import HealthMonitor
from services.engine.front.kv_events import KvEventLog, KvEventPublisher, NoKvEvents
from services.engine.front.load_report import LoadState
from services.engine.front.metrics import EngineMetrics
from services.engine.front.open_requests import OpenRequests
from services.engine.front.placement_member import make_placement_member
from services.engine.front.public_servicer import PublicServicer
from services.engine.front.registration import RegistryEntry, choose_engine_id, engine_info
from services.engine.front.request_translation import ModelFacts
from services.engine.front.servicer import EngineServicer, RequestRunner
from services.engine.front.spans import RequestSpans
from services.engine.model_files import load_text_assets
from services.engine.model_files.known_models import find_model
from services.engine.model_files.template_check import check_template

log = logging.getLogger(__name__)
ENGINE_SERVICE = "inferfleet.internal.v1.Engine"
PUBLIC_SERVICE = "inferfleet.v1.Inference"
_STANDBY_POLL_S = 0.05
_CLOSE_S = 2.0
"""Time for clients to read the last events of their streams."""


class EngineService:
    """One engine, run by `lifecycle.run`.

    Args:
        core: replaces the core process, in tests.

    Raises:
        ConfigError: a key can be seen to be wrong before the model is loaded.
    """

    def __init__(
        self,
        config: FrontConfig,
        telemetry: telemetry.Telemetry,
        core: CoreClient | None = None,
    ) -> None:
        self._config = config
        self._telemetry = telemetry
        self._core = CoreLink() if core is None else core
        self._engine_id = choose_engine_id(config)
        self._membership = rpc.Membership.from_config(config)
        self._etcd = connect(config) if config.etcd else None
        self._metrics = EngineMetrics()
        self._stack = contextlib.AsyncExitStack()
        self._background = Background(on_failure=self._fail)
        self.load_state = LoadState(
            self._engine_id,
            epoch_ms=int(time.time() * 1000),
            stall_s=config.stall_s,
            count_open=lambda: 0 if self._requests is None else self._requests.num_in_core,
        )
        self._health = HealthMonitor(self.load_state, lambda: self._core_alive)
        self._requests: OpenRequests | None = None
        self._entry: RegistryEntry | None = None
        self._registered = ""
        self.address = ""
        self.public_address = ""
        self.metrics_address = ""

    async def start(self) -> None:
        """Load the model, then listen, then register.

        Raises:
            ConfigError: the configuration cannot be used, or the core cannot start with it.
        """
        config = self._config
        if self._etcd is not None:
            self._stack.push_async_callback(self._etcd.close)
        core = asyncio.create_task(self._start_core())  # on another CPU meanwhile
        try:
            assets = await asyncio.to_thread(_load_assets, config)
            tokenizer = await asyncio.to_thread(Tokenizer, assets)
            ready = await core
        finally:
            await cancel_and_wait(core)
        await self._start_services(ready, assets, tokenizer)
        self._stack.push_async_callback(self._end_streams)
        write_ready(
            config.ready_file,
            service="engine",
            address=self.address,
            metrics_address=self.metrics_address,
        )
        log.info("engine %s serves %s on %s", self._engine_id, ready.info.model, self.address)

    async def drain(self) -> None:
        """Refuse new requests; streams that outlast `drain_grace_s` are ended with a status."""
        if self._requests is None:
            return
        await self.load_state.set_draining()
        await self._publish_state()
        ended, cut = await self._requests.drain(self._config.drain_grace_s)
        log.info("drained: %d streams finished, %d were cut", ended, cut)
        await self._requests.wait_closed(_CLOSE_S)

    async def stop(self) -> None:
        """Stop everything in reverse order; idempotent, and safe after a failed start."""
        await self._stack.aclose()

    async def failed(self) -> str:
        """Return the reason once the core can serve no more and every stream has its status."""
        assert self._requests is not None, "the engine is not started"
        reason = await self._requests.core_failure
        await self._health.publish()
        await self._requests.wait_closed(_CLOSE_S)
        return reason

    @property
    def _core_alive(self) -> bool:
        return self._requests is not None and not self._requests.core_failure.done()

    def _fail(self, reason: str) -> None:
        """A background task that the engine needs has ended: fail, so that it is restarted."""
        if self._requests is not None:
            self._requests.fail_all(reason)

    async def _start_core(self) -> CoreReady:
        log.info("loading %s", self._config.model or "the default model")
        self._stack.push_async_callback(self._core.stop)
        try:
            ready = await self._core.start(self._config)
        except CoreDiedError as error:
            raise ConfigError(f"the core did not start: {error}") from error
        log.info(
            "loaded %s in %.1f s: weights %.0f MiB; %d blocks of %d tokens, %.0f MiB; "
            "longest request %d tokens",
            ready.info.model,
            ready.info.load_s,
            ready.info.weights_bytes / 2**20,
            ready.num_blocks,
            ready.block_size,
            ready.kv_bytes / 2**20,
            ready.max_model_len,
        )
        return ready

    async def _start_services(
        self, ready: CoreReady, assets: TextAssets, tokenizer: Tokenizer
    ) -> None:
        facts = ModelFacts(
            model=ready.info.model,
            model_revision=ready.info.model_revision,
            numerics_id=ready.info.numerics_id,
            vocab_size=ready.info.vocab_size,
            max_model_len=ready.max_model_len,
            engine_id=self._engine_id,
        )
        self._metrics.set_capacity(ready)
        self._forward_log_level()
        requests = await self._start_requests(ready, facts, tokenizer)
        spans = RequestSpans(self._telemetry.tracer, facts, self.load_state)
        runner = RequestRunner(requests, spans)
        self._entry = await self._start_engine_service(ready, assets, requests, runner)
        if self._config.public:
            await self._start_public_service(PublicServicer(runner, facts, assets, tokenizer))
        self._start_metrics()
        await self._health.publish()
        self._background.spawn(self._health.watch(self._entry.refresh), "health")
        self._stack.push_async_callback(self._entry.stop)
        if self._config.standby_file:
            standby = self._register_later(Path(self._config.standby_file).exists)
            # It ends before the entry stops, and not with the other tasks, or it could register.
            task = self._background.spawn(standby, "standby")
            self._stack.push_async_callback(cancel_and_wait, task)
        else:
            await self._entry.start()

    async def _register_later(self, is_due: Callable[[], bool]) -> None:
        """Register once the engine is to be used."""
        assert self._entry is not None
        log.info("loaded; standing by until %s exists", self._config.standby_file)
        while not is_due():  # noqa: ASYNC110 - a file sets no event
            await asyncio.sleep(_STANDBY_POLL_S)
        await self._entry.start()
        await never()

    async def _start_requests(
        self, ready: CoreReady, facts: ModelFacts, tokenizer: Tokenizer
    ) -> OpenRequests:
        config = self._config
        events = self._start_kv_events()
        on_report = await self._start_placement(ready)
        self._requests = OpenRequests(
            self._core,
            facts,
            tokenizer,
            self.load_state,
            self._metrics,
            events,
            max_open=ready.max_num_seqs + config.max_waiting,
            buffer_tokens=config.stream_buffer_tokens,
            on_report=on_report,
        )
        self._stack.push_async_callback(self._background.close)
        self._background.spawn(self._requests.pump_reports(), "pump")
        return self._requests

    async def _start_engine_service(
        self, ready: CoreReady, assets: TextAssets, requests: OpenRequests, runner: RequestRunner
    ) -> RegistryEntry:
        config = self._config
        server, self.address = self._bind(config.port, ENGINE_SERVICE, self._membership)
        self._registered = advertised_address(config, self.address, config.etcd)
        info = engine_info(
            config,
            ready,
            assets,
            engine_id=self._engine_id,
            epoch_ms=self.load_state.epoch_ms,
            address=self._registered,
        )
        servicer = EngineServicer(requests, runner, info, assets)
        engine_pb2_grpc.add_EngineServicer_to_server(servicer, server)
        await self._listen(server)
        self._stack.push_async_callback(servicer.close, _CLOSE_S)
        return RegistryEntry(info, self.load_state, self._etcd)

    async def _start_public_service(self, servicer: PublicServicer) -> None:
        server, self.public_address = self._bind(self._config.public_port, PUBLIC_SERVICE, None)
        inference_pb2_grpc.add_InferenceServicer_to_server(servicer, server)
        await self._listen(server)
        log.info("public service on %s", self.public_address)

    def _bind(
        self, port: int, service: str, members: rpc.Membership | None
    ) -> tuple[grpc.aio.Server, str]:
        host = self._config.host
        server = rpc.make_server(membership=members, address=lambda: self._registered)
        chosen = self._membership.bind(server, f"{host}:{port}", members_only=members is not None)
        self._health.add_service(rpc.add_health_and_reflection(server, [service]), service)
        return server, f"{host}:{chosen}"

    async def _listen(self, server: grpc.aio.Server) -> None:
        await server.start()
        self._stack.push_async_callback(server.stop, 1.0)

    def _start_metrics(self) -> None:
        server = MetricsServer(
            self._metrics.registry,
            lambda: self._health.serving,
            self._telemetry.log_level,
            self._membership.token,
        )
        self.metrics_address = server.start(self._config.host, self._config.metrics_port)
        self._stack.callback(server.stop)

    def _forward_log_level(self) -> None:
        """Give the core the log level of the front, now (the core starts at info) and later."""
        loop = asyncio.get_running_loop()

        def forward(level: str) -> None:
            loop.call_soon_threadsafe(self._core.send, [SetLogLevel(level=level)])

        if self._telemetry.log_level.current != "info":
            forward(self._telemetry.log_level.current)
        self._stack.callback(self._telemetry.log_level.follow(forward))

    def _start_kv_events(self) -> KvEventPublisher | NoKvEvents:
        if not self._config.kvcache:
            return NoKvEvents()
        events = KvEventLog(self._engine_id, self.load_state.epoch_ms)
        self._metrics.watch_kv_events(events)
        publisher = KvEventPublisher(
            self._config.kvcache,
            self._membership,
            events,
            request_snapshot=lambda: self._core.send([SendSnapshot()]),
        )
        publisher.start()
        self._stack.push_async_callback(publisher.stop)
        return publisher

    async def _start_placement(self, ready: CoreReady) -> Callable[[RoundReport], None] | None:
        member = make_placement_member(
            self._config,
            ready,
            self._engine_id,
            lambda placement: self._core.send([ApplyPlacement(placement=placement)]),
        )
        if member is None:
            return None
        self._stack.push_async_callback(member.close)
        await member.start()
        self._background.spawn(member.run(), "placement")
        return member.handle_report

    async def _publish_state(self) -> None:
        await self._health.publish()
        if self._entry is not None:
            await self._entry.refresh()

    async def _end_streams(self) -> None:
        """End the streams that are still open (a second signal cuts the drain short)."""
        if self._requests is None:
            return
        self._requests.expect_core_end()
        await self.load_state.set_draining()
        if self._requests.end_all():
            await self._requests.wait_closed(_CLOSE_S)


def _load_assets(config: FrontConfig) -> TextAssets:
    if config.simulate:
        return byte_assets()
    try:
        assets = load_text_assets(config.model)
        check_template(assets, find_model(config.model).path)
        return assets
    except ModelFileError as error:
        raise ConfigError(str(error)) from error
