"""Leader election in etcd by lease and transaction, with a fence for the leader's writes."""

import asyncio
import logging
import random
import time
from collections.abc import Callable
from dataclasses import dataclass

from services.common.etcd.client import Compare, Etcd, EtcdError, LeaseNotFoundError, Put
from services.common.tasks import cancel_and_wait

log = logging.getLogger(__name__)
_STOP_S = 2.0


@dataclass(frozen=True)
class Leadership:
    """One term of a leader. A leader's writes compare `fence`, so a former one cannot write."""

    key: str
    create_revision: int

    @property
    def fence(self) -> Compare:
        """A comparison for each transaction of the leader."""
        return Compare(self.key, "create", self.create_revision)


class Election:
    """Tries to acquire a key until stopped, and holds it while its lease lives.

    Args:
        etcd: closed by its owner, after `stop`.
        key: its holder is the leader.
        value: the holder's name, for readers of the key.
        ttl_s: seconds after which a leader that is cut off or killed can be replaced.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        etcd: Etcd,
        key: str,
        value: bytes,
        ttl_s: int = 5,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._etcd = etcd
        self._key = key
        self._value = value
        self._ttl_s = ttl_s
        self._clock = clock
        self._lease = 0
        self._term: Leadership | None = None
        self._good_until = 0.0
        self._elected = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def leadership(self) -> Leadership | None:
        """The current term; None without one, and as soon as the lease may have expired."""
        return self._term if self._clock() < self._good_until else None

    async def start(self) -> None:
        """Begin in the background; returns at once, even if etcd is unavailable."""
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name=f"election {self._key}")

    async def wait_elected(self) -> Leadership:
        """Return once this process is the leader."""
        while (term := self.leadership) is None:
            self._elected.clear()
            await self._elected.wait()
        return term

    async def stop(self) -> None:
        """Resign, so that a successor need not wait for the lease; bounded in time, idempotent."""
        task, self._task = self._task, None
        if task is None:
            return
        await cancel_and_wait(task)
        self._term, self._good_until = None, 0.0
        lease, self._lease = self._lease, 0
        if lease:
            try:
                async with asyncio.timeout(_STOP_S):
                    await self._etcd.revoke_lease(lease)
            except (EtcdError, TimeoutError) as error:
                log.warning(
                    "%s: not deleted, its lease will expire (%s)",
                    self._key,
                    str(error) or "no answer",
                )

    async def _run(self) -> None:
        while True:
            try:
                await self._renew_or_acquire()
            except LeaseNotFoundError:
                self._step_down("its lease has expired")
                self._lease = 0
                continue
            except EtcdError as error:
                log.debug("%s: %s", self._key, error)
                if self.leadership is None:
                    self._step_down("etcd is unavailable")
            await asyncio.sleep(self._ttl_s / 3 * random.uniform(0.5, 1.0))

    async def _renew_or_acquire(self) -> None:
        """Renew the lease, then check the holder of the key, and acquire it if there is none."""
        began = self._clock()
        if self._lease:
            await self._etcd.keep_alive(self._lease)
        else:
            self._lease = await self._etcd.grant_lease(self._ttl_s)
        holder = await self._etcd.get(self._key)
        if holder is None:
            vacant = [Compare(self._key, "create", 0)]
            put = Put(self._key, self._value, self._lease)
            await self._etcd.transaction(vacant, [put])
            # Read the key again: the transaction may be done although its answer was lost.
            holder = await self._etcd.get(self._key)
        if holder is None or holder.lease != self._lease:
            self._step_down("another process is the leader")
            return
        term = Leadership(self._key, holder.create_revision)
        if term != self._term:
            log.info("%s: elected (revision %d)", self._key, term.create_revision)
        self._term, self._good_until = term, began + self._ttl_s
        self._elected.set()

    def _step_down(self, why: str) -> None:
        if self._term is not None:
            log.warning("%s: no longer the leader: %s", self._key, why)
        self._term, self._good_until = None, 0.0
