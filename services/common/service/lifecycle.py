"""A service's life: start, announce readiness, wait for SIGTERM or SIGINT, drain, stop.

SIGUSR1 turns debug logging on, and off again.

ready when `start` returns; `stop` is idempotent and safe after a failed start
"""

import asyncio
import json
import logging
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Protocol

import uvloop

from services.common.config.settings import ConfigError
from services.common.service import telemetry

log = logging.getLogger(__name__)


class Service(Protocol):
    """What `run` needs of a service."""

    async def start(self) -> None:
        """Return when the service serves.

        Raises:
            ConfigError: what it was told cannot be used (status 2, one line).
        """

    async def drain(self) -> None:
        """Refuse new work and return when the running work has ended or the grace is over."""

    async def stop(self) -> None:
        """Free everything; called once at the end, also after a failed start."""

    async def failed(self) -> str:
        """Return, with the reason, when the service cannot go on (else never)."""


def run(make: Callable[[], Service], *, prog: str) -> int:
    """Run a service to its end; returns the process's exit status (0 after a drain)."""
    return uvloop.run(_run(make, prog))


def write_ready(
    path: str, *, service: str, address: str, metrics_address: str, **more: str
) -> None:
    """Announce readiness in `ready_file`, whole or not at all; does nothing for an empty path.

    `more` is for services that listen on further ports, e.g. http_address.
    """
    if not path:
        return
    record = {
        "service": service,
        "address": address,
        "metrics_address": metrics_address,
        "pid": os.getpid(),
        **more,
    }
    scratch = Path(f"{path}.{os.getpid()}")
    scratch.write_text(json.dumps(record))
    scratch.replace(path)


async def never() -> str:
    """For a service that cannot fail by itself."""
    await asyncio.Event().wait()
    return ""


async def _run(make: Callable[[], Service], prog: str) -> int:
    told = asyncio.Event()
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, told.set)
    # Until logging is set up: without a handler the signal would end the process.
    loop.add_signal_handler(signal.SIGUSR1, lambda: None)
    service: Service | None = None
    try:
        service = make()
        configured = telemetry.log_level()
        loop.add_signal_handler(signal.SIGUSR1, telemetry.toggle_debug, configured)
        started = await _or_told(service.start(), told)
        if not started:
            return 0
        return await _serve(service, told)
    except ConfigError as error:
        print(f"{prog}: {error}", file=sys.stderr)
        return 2
    finally:
        if service is not None:
            await service.stop()


async def _serve(service: Service, told: asyncio.Event) -> int:
    failure = asyncio.ensure_future(service.failed())
    signalled = asyncio.ensure_future(told.wait())
    await asyncio.wait({failure, signalled}, return_when=asyncio.FIRST_COMPLETED)
    signalled.cancel()
    if failure.done():
        log.error("cannot go on: %s", failure.result())
        return 1
    failure.cancel()
    told.clear()
    log.info("draining")
    await _or_told(service.drain(), told)  # a second signal ends the wait
    return 0


async def _or_told(work: Awaitable[None], told: asyncio.Event) -> bool:
    """Whether `work` ended before the signal; it is cancelled otherwise."""
    task = asyncio.ensure_future(work)
    signalled = asyncio.ensure_future(told.wait())
    await asyncio.wait({task, signalled}, return_when=asyncio.FIRST_COMPLETED)
    signalled.cancel()
    if task.done():
        task.result()
        return True
    task.cancel()
    await asyncio.wait({task})
    return False
