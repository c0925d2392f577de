"""Finds free ports on this machine: near a requested one, or at random for internal services."""

import random
import socket
from collections.abc import Iterable

from inferfleet_cli.errors import CliError

TRIES = 100
# Below the range from which Linux and macOS take ports of outgoing connections. A port that is free
# now is therefore still free when its service binds it, also after a restart.
INTERNAL = range(20_000, 32_000)


def is_free(port: int, host: str = "127.0.0.1") -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def next_free(requested: int, avoid: Iterable[int] = ()) -> int:
    """The requested port, or the first free one above it; 0 means any free port.

    Raises:
        CliError: none of the next 100 ports is free.
    """
    if requested == 0:
        return take(1, avoid)[0]
    taken = set(avoid)
    for port in range(requested, min(requested + TRIES, 65_536)):
        if port not in taken and is_free(port):
            return port
    raise CliError(f"no free port between {requested} and {requested + TRIES - 1}")


def take(count: int, avoid: Iterable[int] = ()) -> list[int]:
    """`count` different free ports, at random so that two fleets seldom choose the same ones."""
    taken = set(avoid)
    found: list[int] = []
    for port in random.sample(INTERNAL, len(INTERNAL)):
        if len(found) == count:
            break
        if port not in taken and is_free(port):
            found.append(port)
    if len(found) < count:
        raise CliError(f"fewer than {count} free ports between {INTERNAL[0]} and {INTERNAL[-1]}")
    return found
