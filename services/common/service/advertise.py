"""The address under which other processes reach a service: one rule for all services.

`advertise` is used as given. Without it, it is the address that the service listens on. A wildcard
host (0.0.0.0, ::) cannot be connected to from elsewhere, so a service that registers in etcd then
advertises the address of its own host on the route to etcd.
"""

import logging
import socket
from collections.abc import Sequence

from services.common.config.service_config import ServiceConfig
from services.common.config.settings import ConfigError
from services.common.etcd.client import parse_endpoint

log = logging.getLogger(__name__)

WILDCARDS = ("0.0.0.0", "::", "[::]", "")


def advertised_address(config: ServiceConfig, address: str, peers: Sequence[str] = ()) -> str:
    """Return host:port for other processes.

    Args:
        address: host:port that the service listens on.
        peers: endpoints on the network over which others come, e.g. etcd's. Empty for a service
            that registers nowhere: its address is then only logged and written to `ready_file`.

    Raises:
        ConfigError: the host is a wildcard and no route leads to any of the peers.
    """
    if config.advertise or config.host not in WILDCARDS or not peers:
        return config.advertise or address
    port = address.rpartition(":")[2]
    for peer in peers:
        host = _own_address_towards(peer)
        if host is not None:
            shown = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
            log.info("advertising %s, the address of this host on the route to %s", shown, peer)
            return shown
    raise ConfigError(
        f"advertise: needed, because host is {config.host!r} and this host has no route to "
        f"{', '.join(peers)}; set host:port that others can reach"
    )


def _own_address_towards(peer: str) -> str | None:
    """The source address of this host's route to a peer; sends nothing."""
    target, _ = parse_endpoint(peer)
    host, _, port = target.rpartition(":")
    try:
        found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)
    except (OSError, ValueError):
        return None
    for family, kind, protocol, _, where in found:
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.connect(where)
                return str(probe.getsockname()[0])
        except OSError:
            continue
    return None
