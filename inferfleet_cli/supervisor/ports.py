"""Ports on this machine: the wanted one or the next free, and free ones nobody cares about."""

import random
import socket
from collections.abc import Iterable

TRIES = 100
# Below the range from which Linux and macOS take the ports of outgoing connections, so that a port
# that is free now is free when its service binds it, also after a restart.
INTERNAL = range(20_000, 32_000)


def is_free(port: int, host: str = "127.0.0.1") -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def next_free(wanted: int, avoid: Iterable[int] = ()) -> int:
    """`wanted`, or the first free port above it; 0 asks for any.

    Raises:
        OSError: none of the next 100 is free.
    """
    if wanted == 0:
        return take(1, avoid)[0]
    taken = set(avoid)
    for port in range(wanted, min(wanted + TRIES, 65_536)):
        if port not in taken and is_free(port):
            return port
    raise OSError(f"no free port between {wanted} and {wanted + TRIES - 1}")


def take(count: int, avoid: Iterable[int] = ()) -> list[int]:
    """`count` different free ports, chosen at random so that two fleets seldom meet."""
    taken = set(avoid)
    found: list[int] = []
    for port in random.sample(INTERNAL, len(INTERNAL)):
        if len(found) == count:
            break
        if port not in taken and is_free(port):
            found.append(port)
    if len(found) < count:
        raise OSError(f"fewer than {count} free ports between {INTERNAL[0]} and {INTERNAL[-1]}")
    return found
