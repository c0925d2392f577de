"""The registered engines, balancers and alias records: in etcd, or given in the configuration."""

import asyncio
import logging
from collections.abc import Sequence

from services.common.etcd.client import Etcd
from services.common.etcd.config import connect
from services.common.etcd.model_alias import MODELS_PREFIX
from services.common.etcd.registry import BALANCERS_PREFIX, ENGINES_PREFIX, RegistryView
from services.common.rpc import Membership
from services.gateway.config import GatewayConfig
from services.gateway.models.catalog import addresses_of
from services.gateway.models.static_engines import StaticEngines

log = logging.getLogger(__name__)

FIRST_LISTING_S = 5.0


class FleetRegistry:
    """Owns the connection to etcd and the views of the registry.

    Raises:
        ConfigError: the options of etcd cannot be used.
    """

    def __init__(self, config: GatewayConfig, membership: Membership) -> None:
        self._config = config
        self.etcd: Etcd | None = connect(config) if config.etcd else None
        self.engines: RegistryView | StaticEngines
        self.aliases: RegistryView | None = None
        """The alias records; None without etcd."""
        self.balancers: RegistryView | None = None
        """None if the configuration gives the balancers."""
        if self.etcd is None:
            self.engines = StaticEngines(config.engines, membership)
            return
        self.engines = RegistryView(self.etcd, ENGINES_PREFIX)
        self.aliases = RegistryView(self.etcd, MODELS_PREFIX)
        if not config.balancers:
            self.balancers = RegistryView(self.etcd, BALANCERS_PREFIX)

    async def start(self) -> None:
        """Begin to follow the registry; waits a few seconds for the first listing."""
        await self.engines.start()
        for view in (self.balancers, self.aliases):
            if view is not None:
                await view.start()
        await self._wait_first_listing()

    async def close(self) -> None:
        """Stop following and disconnect; idempotent."""
        await self.engines.stop()
        for view in (self.balancers, self.aliases):
            if view is not None:
                await view.stop()
        if self.etcd is not None:
            await self.etcd.close()

    def balancer_addresses(self) -> Sequence[str]:
        """host:port of the current balancers."""
        return self._config.balancers if self.balancers is None else addresses_of(self.balancers)

    async def _wait_first_listing(self) -> None:
        """Wait a little for etcd, so that a gateway that is ready has its models."""
        if not isinstance(self.engines, RegistryView):
            return
        try:
            async with asyncio.timeout(FIRST_LISTING_S):
                await self.engines.wait_listed()
                if self.aliases is not None:
                    await self.aliases.wait_listed()
        except TimeoutError:
            log.warning("etcd does not answer; no model is served until it does")
