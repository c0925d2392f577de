"""Requests now at this gateway: refuses a second one of the same id, and tells when all ended."""

import asyncio
import contextlib
from collections.abc import Iterator

from services.common.errors import AlreadyExistsError, UnavailableError


class InFlight:
    """Owned by the gateway's loop; every request holds its place from arrival to end."""

    def __init__(self) -> None:
        self._held: set[tuple[str, str]] = set()
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
    def holding(self, tenant: str, request_id: str) -> Iterator[None]:
        """Hold a place.

        Raises:
            AlreadyExistsError: the tenant has a request of this id in flight.
            UnavailableError: the gateway is draining.
        """
        if self._draining:
            raise UnavailableError("this gateway is draining", reason="DRAINING", retry_after_s=1)
        key = (tenant, request_id)
        if key in self._held:
            raise AlreadyExistsError(f"request id {request_id} is in flight")
        self._held.add(key)
        self._idle.clear()
        try:
            yield
        finally:
            self._held.discard(key)
            if not self._held:
                self._idle.set()

    async def drain(self, grace_s: float) -> bool:
        """Refuse new requests; returns whether all ended within the grace."""
        self._draining = True
        try:
            async with asyncio.timeout(grace_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True
