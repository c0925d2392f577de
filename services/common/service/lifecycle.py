"""The life of a service's process: start, announce readiness, wait for a signal, drain, stop.

`main` is the body of every `__main__.py`. SIGTERM and SIGINT drain the service; a second one cuts
the drain short. SIGUSR1 switches debug logging on, and off again.
"""

import asyncio
import contextlib
import json
import logging
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Protocol, TypeVar

import uvloop

from services.common.config.service_config import ServiceConfig
from services.common.config.settings import ConfigError, load_or_exit
from services.common.service import telemetry
from services.common.service.telemetry import Telemetry

log = logging.getLogger(__name__)

Config = TypeVar("Config", bound=ServiceConfig)


class Service(Protocol):
    """What `run` needs of a service."""

    async def start(self) -> None:
        """Return when the service serves.

        Raises:
            ConfigError: the configuration cannot be used (exit status 2, one line on stderr).
        """

    async def drain(self) -> None:
        """Refuse new work; return when the running work has ended or `drain_grace_s` is over."""

    async def stop(self) -> None:
        """Free everything; idempotent, and safe after a failed start."""

    async def failed(self) -> str:
        """Return the reason when the service cannot continue; never returns otherwise."""


def main(
    name: str,
    config_class: type[Config],
    make: Callable[[Config, Telemetry], Service],
    *,
    description: str,
    attributes: Callable[[Config], Mapping[str, str]] = lambda config: {},
) -> int:
    """Run `python -m services.<name>`; returns the exit status of the process.

    The status is 0 after a drain, 1 if the service failed, 2 for an unusable configuration.

    Args:
        make: makes the service inside the event loop; has no side effects.
        description: what `--help` shows.
        attributes: further resource attributes of the service's spans.
    """
    prog = f"python -m services.{name}"
    config = load_or_exit(config_class, sys.argv[1:], prog=prog, description=description)
    with contextlib.ExitStack() as stack:

        def make_with_telemetry() -> Service:
            opened = telemetry.setup(
                name,
                otlp_endpoint=config.otlp_endpoint,
                log_level=config.log_level,
                attributes=attributes(config),
            )
            stack.callback(opened.close)
            telemetry.log_stray_output()
            asyncio.get_running_loop().add_signal_handler(
                signal.SIGUSR1, opened.log_level.toggle_debug
            )
            return make(config, opened)

        return run(make_with_telemetry, prog=prog)


def run(make: Callable[[], Service], *, prog: str) -> int:
    """Run a service to its end; returns the exit status of the process.

    Args:
        make: makes the service, inside the event loop and with its signal handlers in place.
        prog: precedes the message of a ConfigError.
    """
    return uvloop.run(_run(make, prog))


def write_ready(
    path: str, *, service: str, address: str, metrics_address: str, **more: str
) -> None:
    """Write `ready_file` atomically; does nothing for an empty path.

    Args:
        more: addresses of further ports that the service listens on, e.g. http_address.
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
    """The `failed` of a service that cannot fail by itself."""
    await asyncio.Event().wait()
    return ""


async def _run(make: Callable[[], Service], prog: str) -> int:
    signalled = asyncio.Event()
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, signalled.set)
    # `main` replaces it once logging is set up; without a handler the signal ends the process.
    loop.add_signal_handler(signal.SIGUSR1, lambda: None)
    service: Service | None = None
    try:
        service = make()
        started = await _finish_or_signal(service.start(), signalled)
        if not started:
            return 0
        return await _serve(service, signalled)
    except ConfigError as error:
        print(f"{prog}: {error}", file=sys.stderr)
        return 2
    finally:
        if service is not None:
            await service.stop()


async def _serve(service: Service, signalled: asyncio.Event) -> int:
    failure = asyncio.ensure_future(service.failed())
    signal_wait = asyncio.ensure_future(signalled.wait())
    await asyncio.wait({failure, signal_wait}, return_when=asyncio.FIRST_COMPLETED)
    signal_wait.cancel()
    if failure.done():
        log.error("stopping, because the service failed: %s", failure.result())
        return 1
    failure.cancel()
    signalled.clear()
    log.info("draining")
    await _finish_or_signal(service.drain(), signalled)
    return 0


async def _finish_or_signal(work: Awaitable[None], signalled: asyncio.Event) -> bool:
    """Whether `work` ended before the signal; it is cancelled otherwise."""
    task = asyncio.ensure_future(work)
    signal_wait = asyncio.ensure_future(signalled.wait())
    await asyncio.wait({task, signal_wait}, return_when=asyncio.FIRST_COMPLETED)
    signal_wait.cancel()
    if task.done():
        task.result()
        return True
    task.cancel()
    await asyncio.wait({task})
    return False
