"""The start and the stop of a gateway in this process."""

import httpx
import pytest
from opentelemetry.sdk.trace import TracerProvider

from services.common.config.settings import ConfigError
from services.common.service.telemetry import Telemetry
from services.gateway.config import GatewayConfig
from services.gateway.service import GatewayService


def service_with(**keys) -> GatewayService:
    config = GatewayConfig(port=0, http_port=0, log_level="error", **keys)
    return GatewayService(config, Telemetry(TracerProvider(shutdown_on_exit=False)))


def test_engines_and_balancers_or_etcd_are_needed():
    with pytest.raises(ConfigError, match="etcd: needed"):
        service_with(engines=("127.0.0.1:1",))


async def test_a_stop_without_a_start_and_a_second_stop_are_safe(engine):
    service = service_with(engines=(engine.address,), balancers=(engine.address,))
    await service.stop()
    await service.stop()


async def test_a_failed_start_frees_what_it_has_opened(engine, gateway):
    taken = int(gateway.http.rpartition(":")[2])
    service = service_with(
        engines=(engine.address,), balancers=(engine.address,), metrics_port=taken
    )
    with pytest.raises(ConfigError, match="metrics_port: cannot listen"):
        await service.start()
    assert service._background._tasks
    await service.stop()
    assert not service._background._tasks
    async with httpx.AsyncClient(base_url=f"http://{gateway.http}") as http:
        assert (await http.get("/healthz")).text == "ok\n"
