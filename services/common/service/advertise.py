"""What others are told to connect to, when a service listens on every address of its host."""

import logging
import socket
from collections.abc import Sequence

from services.common.config.service_config import ServiceConfig
from services.common.config.settings import ConfigError
from services.common.etcd.client import parse_endpoint

log = logging.getLogger(__name__)

WILDCARDS = ("0.0.0.0", "::", "[::]", "")


def advertised(config: ServiceConfig, address: str, peers: Sequence[str]) -> str:
    """`advertise` if it is set; `address`; or, if that is a wildcard, this host's own address.

    Args:
        address: host:port that the service listens on.
        peers: endpoints of what is reached over the network that others come by, e.g. etcd's;
            with none nobody is told anything.

    Raises:
        ConfigError: no address of this host can be told.
    """
    if config.advertise or config.host not in WILDCARDS or not peers:
        return config.advertise or address
    port = address.rpartition(":")[2]
    for peer in peers:
        host = _own_address_towards(peer)
        if host:
            shown = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
            log.info("others are told %s, the address towards %s", shown, peer)
            return shown
    raise ConfigError(
        f"advertise: needed, because host is {config.host!r} and no address of this host leads to "
        f"{', '.join(peers)}; give host:port that others can reach"
    )


def _own_address_towards(peer: str) -> str:
    """The source address of this host's route to a peer; nothing is sent."""
    target, _ = parse_endpoint(peer)
    host, _, port = target.rpartition(":")
    try:
        found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)
    except (OSError, ValueError):
        return ""
    for family, kind, protocol, _, where in found:
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.connect(where)
                return str(probe.getsockname()[0])
        except OSError:
            continue
    return ""
