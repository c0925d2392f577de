"""Waiting for the end of a phase; see `step`."""

from kernels.compiled.primitives import compiled, load, pause, yield_core

_MAX_SPINS = 2000
"""Iterations of a waiting loop before it yields the core to other threads."""


@compiled
def wait_for(address: int, least: int) -> None:
    """Wait until the int64 at `address` is at least `least`."""
    spins = 0
    while load(address) < least:
        pause()
        spins += 1
        if spins > _MAX_SPINS:
            yield_core()
