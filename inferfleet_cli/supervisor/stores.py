"""Runs Redis and etcd of a local fleet, and restarts them when they end."""

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from inferfleet_cli.errors import CliError
from inferfleet_cli.supervisor import dev_backends
from inferfleet_cli.supervisor.child import GOOD_RUN_S, ChildStatus, restart_delay_s, when_text
from inferfleet_cli.supervisor.secured_etcd import SecuredEtcd
from inferfleet_cli.supervisor.state_dir import StateDir

POLL_S = 0.25
BLOCKING_STOP_S = 5.0


class Store:
    """One store server. All its blocking calls run on `thread`.

    The thread must live as long as the server, because on Linux its end kills the server.
    """

    def __init__(
        self,
        name: str,
        server: dev_backends.ServerProcess,
        thread: ThreadPoolExecutor,
        on_event: Callable[[str], None],
    ) -> None:
        self.name = name
        self.note = server.binary.note
        self._server = server
        self._thread = thread
        self._on_event = on_event
        self._watcher: asyncio.Task[None] | None = None
        self._restarts = 0
        self._since = time.monotonic()

    async def start(self) -> float:
        """Start the server and wait until it answers; returns the seconds that this took.

        Raises:
            CliError: it does not start.
        """
        self._since = time.monotonic()
        await self._launch()
        self._watcher = asyncio.create_task(self._keep_running(), name=f"keep {self.name}")
        return time.monotonic() - self._since

    async def stop(self) -> None:
        """Stop the server; idempotent."""
        if self._watcher is not None:
            self._watcher.cancel()
            await asyncio.wait({self._watcher})
            self._watcher = None
        await self._call(lambda: self._server.stop(BLOCKING_STOP_S))

    def kill(self) -> None:
        """Send SIGKILL to the server at once."""
        self._server.kill()

    def status(self) -> ChildStatus:
        running = self._server.running
        return ChildStatus(
            name=self.name,
            state="ready" if running else "restarting",
            pid=self._server.pid,
            address=self._server.address,
            metrics_address="",
            restarts=self._restarts,
            uptime_s=time.monotonic() - self._since,
        )

    async def _keep_running(self) -> None:
        failures = 0
        while True:
            await asyncio.sleep(POLL_S)
            if self._server.running:
                continue
            failures = 1 if time.monotonic() - self._since > GOOD_RUN_S else failures + 1
            delay = restart_delay_s(failures)
            self._on_event(f"{self.name} ended; starting it again {when_text(delay)}")
            await asyncio.sleep(delay)
            self._restarts += 1
            self._since = time.monotonic()
            try:
                await self._launch()
                self._on_event(f"{self.name} is back")
            except CliError as error:
                self._on_event(str(error))

    async def _launch(self) -> None:
        try:
            await self._call(self._server.launch)
        except dev_backends.BackendError as error:
            raise CliError(f"{self.name}: {error}") from error

    async def _call(self, function: Callable[[], None]) -> None:
        await asyncio.get_running_loop().run_in_executor(self._thread, function)


def make_stores(
    state: StateDir,
    ports: tuple[int | None, int | None],
    thread: ThreadPoolExecutor,
    on_event: Callable[[str], None],
) -> list[Store]:
    """Redis and etcd of this machine, on the ports (redis, etcd), with empty data.

    Both demand the password in the state directory, so that no other user of the machine can write
    the registry.

    Args:
        ports: None for a store that is not needed, because the fleet uses another one.

    Raises:
        CliError: a server is missing; the message says how to install one.
    """
    redis_port, etcd_port = ports
    servers: dict[str, dev_backends.ServerProcess] = {}
    try:
        if redis_port is not None:
            servers["redis"] = dev_backends.RedisProcess(
                dev_backends.find_redis(),
                state.data_dir("redis"),
                redis_port,
                {"requirepass": state.store_password()},
            )
        if etcd_port is not None:
            servers["etcd"] = SecuredEtcd(
                dev_backends.find_etcd(),
                state.data_dir("etcd"),
                etcd_port,
                state.store_password(),
            )
    except dev_backends.BackendError as error:
        raise CliError(str(error)) from error
    return [Store(name, server, thread, on_event) for name, server in servers.items()]
