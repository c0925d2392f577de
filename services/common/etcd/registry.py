"""Service discovery in etcd: a service's own key under a lease, and a reader's view of such keys.

Neither side fails while etcd is unavailable: a writer keeps trying to register, and a reader keeps
the last known records until it has listed them again.
"""

import asyncio
import contextlib
import logging
import random
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Protocol

from services.common.etcd.client import Changes, Etcd, EtcdError, LeaseNotFoundError, Listing, Lost
from services.common.tasks import cancel_and_wait

log = logging.getLogger(__name__)

ENGINES_PREFIX = "/inferfleet/engines/"
BALANCERS_PREFIX = "/inferfleet/balancers/"
_STOP_S = 2.0


class Registration:
    """Keeps one key of this process in etcd, and writes it again when etcd has lost it.

    Args:
        etcd: closed by its owner, after `stop`.
        key: e.g. ENGINES_PREFIX + engine_id.
        value_fn: returns the current value; called at each write.
        ttl_s: how long the key outlives a killed process, in seconds.
    """

    def __init__(self, etcd: Etcd, key: str, value_fn: Callable[[], bytes], ttl_s: int = 5) -> None:
        self._etcd = etcd
        self._key = key
        self._value_fn = value_fn
        self._ttl_s = ttl_s
        self._lease = 0
        self._renew_at = 0.0
        self._changed = asyncio.Event()
        self._registered = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begin to register in the background; returns at once, even if etcd is unavailable."""
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name=f"register {self._key}")

    async def refresh(self) -> None:
        """Write the changed value soon; returns at once."""
        self.refresh_soon()

    def refresh_soon(self) -> None:
        """The same for callers that are not coroutines."""
        self._changed.set()

    async def wait_registered(self) -> None:
        """Return once the key is in etcd."""
        await self._registered.wait()

    @property
    def registered(self) -> bool:
        """Whether the key was in etcd at the last check."""
        return self._registered.is_set()

    async def stop(self) -> None:
        """Delete the key if it still belongs to this process; bounded in time, idempotent."""
        task, self._task = self._task, None
        if task is None:
            return
        await cancel_and_wait(task)
        self._registered.clear()
        lease, self._lease = self._lease, 0
        if not lease:
            return
        # Revoking the lease deletes the key only if it still depends on it, never a successor's.
        try:
            async with asyncio.timeout(_STOP_S):
                await self._etcd.revoke_lease(lease)
        except (EtcdError, TimeoutError) as error:
            log.warning(
                "%s: not deleted, its lease will expire (%s)", self._key, str(error) or "no answer"
            )

    async def _run(self) -> None:
        delay_s, quiet = 0.1, False
        while True:
            try:
                await self._register()
                delay_s, quiet = 0.1, False
                while True:
                    await self._maintain()
            except LeaseNotFoundError:
                log.info("%s: lease lost, registering again", self._key)
                self._lease = 0
            except EtcdError as error:
                if not quiet:
                    log.warning("%s: cannot register: %s", self._key, error)
                quiet = True
            self._registered.clear()
            await asyncio.sleep(delay_s * random.uniform(0.5, 1.0))
            delay_s = min(delay_s * 2, 2.0)

    async def _register(self) -> None:
        if self._lease:
            await self._etcd.keep_alive(self._lease)
        else:
            self._lease = await self._etcd.grant_lease(self._ttl_s)
        self._schedule_renewal(self._ttl_s / 3)
        await self._write()

    async def _maintain(self) -> None:
        """Write a changed value, or renew the lease and check that the key is in etcd."""
        # A write does not renew the lease, so a renewal that is due precedes any changes.
        if asyncio.get_running_loop().time() < self._renew_at:
            try:
                # Not wait_for: in Python 3.11 it can lose a cancellation (bpo-37658).
                async with asyncio.timeout_at(self._renew_at):
                    await self._changed.wait()
            except TimeoutError:
                return
        else:
            await self._etcd.keep_alive(self._lease)
            self._schedule_renewal(self._ttl_s / 3)
            current = await self._etcd.get(self._key)
            if current is not None:
                if current.lease != self._lease and self._registered.is_set():
                    log.warning("%s: another process has written this key", self._key)
                    self._registered.clear()
                return
        await self._write()

    def _schedule_renewal(self, seconds: float) -> None:
        self._renew_at = asyncio.get_running_loop().time() + seconds

    async def _write(self) -> None:
        self._changed.clear()
        try:
            await self._etcd.put(self._key, self._value_fn(), lease=self._lease)
        except EtcdError:
            self._changed.set()
            raise
        if not self._registered.is_set():
            log.info("%s: registered", self._key)
        self._registered.set()


class RegistryRecords(Protocol):
    """What a reader of registry records needs; `RegistryView` is one, tests set their own."""

    @property
    def connected(self) -> bool:
        """Whether the snapshot is being kept up to date right now."""

    def snapshot(self) -> Mapping[str, bytes]:
        """Full key → value, as last known; never changes under the reader."""

    async def wait_change(self, version: int) -> int:
        """Return the current version as soon as it differs from `version`."""


class RegistryView:
    """A live copy of all keys below a prefix.

    While etcd is unavailable it shows the last known records. If etcd comes back without the keys
    it becomes empty, so a reader with other evidence of life (an open stream) must weigh both.
    """

    def __init__(self, etcd: Etcd, prefix: str) -> None:
        self._etcd = etcd
        self._prefix = prefix
        self._items: dict[str, bytes] = {}
        self._frozen: Mapping[str, bytes] = MappingProxyType({})
        self._version = 0
        self._connected = False
        self._listed = asyncio.Event()
        self._changed = asyncio.Condition()
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begin to follow in the background; returns at once, even if etcd is unavailable."""
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name=f"watch {self._prefix}")

    async def stop(self) -> None:
        """Stop following; the last snapshot stays readable. Idempotent."""
        task, self._task = self._task, None
        if task is not None:
            await cancel_and_wait(task)
            self._connected = False

    def snapshot(self) -> Mapping[str, bytes]:
        """Full key → value, as last known; never changes under the reader."""
        return self._frozen

    @property
    def version(self) -> int:
        """Grows with every change of the snapshot or of `connected`."""
        return self._version

    @property
    def connected(self) -> bool:
        """Whether the snapshot is being kept up to date right now."""
        return self._connected

    async def wait_listed(self) -> None:
        """Return once the keys have been listed for the first time."""
        await self._listed.wait()

    async def wait_change(self, version: int) -> int:
        """Return the current version as soon as it differs from `version`."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._version != version)
            return self._version

    async def _run(self) -> None:
        async with contextlib.aclosing(self._etcd.watch_prefix(self._prefix)) as items:
            async for item in items:
                await self._apply(item)

    async def _apply(self, item: Listing | Changes | Lost) -> None:
        if isinstance(item, Lost):
            log.warning("watch of %s lost: %s", self._prefix, item.reason)
            self._connected = False
        elif isinstance(item, Listing):
            self._items = {key: kv.value for key, kv in item.items.items()}
            self._connected = True
            self._listed.set()
        else:
            for change in item.changes:
                if change.value is None:
                    self._items.pop(change.key, None)
                else:
                    self._items[change.key] = change.value.value
        self._frozen = MappingProxyType(dict(self._items))
        async with self._changed:
            self._version += 1
            self._changed.notify_all()
