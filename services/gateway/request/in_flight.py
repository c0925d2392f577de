"""The requests in flight: one slot each, by tenant and request id.

Refuses a second request of the same id, and drains the gateway.
"""

import asyncio
import contextlib
from collections.abc import Callable, Iterator

from services.common.errors import AlreadyExistsError, UnavailableError


class InFlight:
    """Owned by the gateway's loop; each request holds a slot from arrival to end."""

    def __init__(self) -> None:
        self._slots: dict[tuple[str, str], Callable[[], None]] = {}
        self._idle = asyncio.Event()
        self._idle.set()
        self._draining = False

    def __len__(self) -> int:
        return len(self._slots)

    @property
    def draining(self) -> bool:
        """Whether new requests are refused."""
        return self._draining

    @contextlib.contextmanager
    def hold_slot(self, tenant: str, request_id: str, abort: Callable[[], None]) -> Iterator[None]:
        """Hold the request's slot.

        Args:
            abort: ends the request; called at most once.

        Raises:
            AlreadyExistsError: a request of this tenant and id is in flight.
            UnavailableError: the gateway is draining.
        """
        if self._draining:
            raise UnavailableError("this gateway is draining", reason="DRAINING", retry_after_s=1)
        key = (tenant, request_id)
        if key in self._slots:
            raise AlreadyExistsError(f"request id {request_id} is already in flight")
        self._slots[key] = abort
        self._idle.clear()
        try:
            yield
        finally:
            del self._slots[key]
            if not self._slots:
                self._idle.set()

    async def drain(self, grace_s: float) -> bool:
        """Refuse new requests; returns whether all running ones ended within the grace."""
        self._draining = True
        return await self._wait_idle(grace_s)

    async def abort_all(self, timeout_s: float) -> bool:
        """Abort running requests; returns whether all ended in time."""
        self._draining = True
        for abort in list(self._slots.values()):
            abort()
        return await self._wait_idle(timeout_s)

    async def _wait_idle(self, timeout_s: float) -> bool:
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True
