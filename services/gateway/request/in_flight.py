"""Requests now at this gateway: refuses a second one of the same id, tells when all ended, and
ends those that outlive the drain."""

import asyncio
import contextlib
from collections.abc import Callable, Iterator

from services.common.errors import AlreadyExistsError, UnavailableError


class InFlight:
    """Owned by the gateway's loop; every request holds its place from arrival to end."""

    def __init__(self) -> None:
        self._held: dict[tuple[str, str], Callable[[], None]] = {}
        self._idle = asyncio.Event()
        self._idle.set()
        self._draining = False

    def __len__(self) -> int:
        return len(self._held)

    @property
    def draining(self) -> bool:
        """Whether new requests are refused."""
        return self._draining

    @contextlib.contextmanager
    def holding(self, tenant: str, request_id: str, cut: Callable[[], None]) -> Iterator[None]:
        """Hold a place.

        Args:
            cut: ends the request, called once at most.

        Raises:
            AlreadyExistsError: the tenant has a request of this id in flight.
            UnavailableError: the gateway is draining.
        """
        if self._draining:
            raise UnavailableError("this gateway is draining", reason="DRAINING", retry_after_s=1)
        key = (tenant, request_id)
        if key in self._held:
            raise AlreadyExistsError(f"request id {request_id} is in flight")
        self._held[key] = cut
        self._idle.clear()
        try:
            yield
        finally:
            del self._held[key]
            if not self._held:
                self._idle.set()

    async def drain(self, grace_s: float) -> bool:
        """Refuse new requests; returns whether all ended within the grace."""
        self._draining = True
        return await self._wait_idle(grace_s)

    async def cut(self, patience_s: float) -> bool:
        """End what still runs; returns whether all took their end in time."""
        self._draining = True
        for cut in list(self._held.values()):
            cut()
        return await self._wait_idle(patience_s)

    async def _wait_idle(self, timeout_s: float) -> bool:
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True
