"""Sends Run calls to one peer: carried in a RunMany call while that is up, else each by itself."""

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from functools import partial
from typing import Any

import grpc

from services.common.rpc import fresh_channel
from services.common.rpc.carrier.carrier import RUN_MANY, Carrier, open_carrier
from services.common.rpc.carrier.proving import ProvingCall
from services.common.rpc.carrier.surface import RunCall
from services.common.rpc.membership import Membership
from services.common.tasks import cancel_and_wait

log = logging.getLogger(__name__)

RUN = "/inferfleet.internal.v1.Engine/Run"
RETRY_S = 1.0
"""Pause before a lost carrier is opened again."""
UNSERVED_RETRY_S = 30.0
"""The same for a peer that does not serve RunMany: a newer one may replace it."""
MAX_CARRIED_BYTES = 1024 * 1024
"""A longer request is sent as a call of its own, so that it does not delay others."""


class CarrierConnection:
    """Opens a carrier with the first call, and another one some time after it was lost.

    No call waits for a carrier. Owned by the owner of the channel.

    Args:
        address: host:port of the peer.
        channel: to the peer, for calls that are not carried.
        registered: whether the address comes from the registry (see `Peer`).
    """

    def __init__(
        self,
        membership: Membership,
        address: str,
        channel: grpc.aio.Channel,
        *,
        registered: bool = False,
    ) -> None:
        self._membership = membership
        self._address = address
        self.peer = membership.peer(channel, address, registered=registered)
        self._run: Any = channel.unary_stream(RUN)  # no serialisers: raw bytes both ways
        self._wide_channel: grpc.aio.Channel | None = None
        self._carrier: Carrier | None = None
        self._version = 0
        self._retry_at_s = 0.0
        self._task: asyncio.Task[None] | None = None
        self._draining: set[asyncio.Task[None]] = set()
        self._closed = False
        self._up = asyncio.Event()

    def run(
        self,
        request: bytes,
        *,
        metadata: Sequence[tuple[str, str | bytes]],
        timeout_s: float | None,
    ) -> RunCall:
        """Begin a call of Run; its messages are bytes.

        Args:
            request: a serialised EngineRequest.
            metadata: added to the proof of membership.
        """
        carrier = self._usable_carrier()
        if carrier is not None and len(request) <= MAX_CARRIED_BYTES:
            return carrier.open(request, metadata, timeout_s)
        shown = self.peer.shown
        if shown is None:
            return ProvingCall(self.peer, partial(self._run, request), metadata, timeout_s)
        call: RunCall = self._run(request, metadata=(*shown, *metadata), timeout=timeout_s)
        return call

    def prepare(self) -> None:
        """Open a carrier if there is none, so that later calls find one."""
        self._usable_carrier()

    @property
    def carries(self) -> bool:
        """Whether the next call will be carried."""
        return self._carrier is not None and self._carrier.up

    async def wait_carries(self) -> None:
        """Return once `carries`; opens a carrier, repeatedly if need be."""
        while not self.carries:
            self.prepare()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._up.wait(), RETRY_S)

    async def drain(self) -> None:
        """Open no new carrier; close once the carried calls have ended by themselves."""
        self._closed = True
        carrier, self._carrier = self._carrier, None
        if carrier is not None:
            await carrier.drain()
        await self.close()

    async def close(self) -> None:
        """Close at once; idempotent. Carried calls are cancelled."""
        self._closed = True
        tasks, self._task = [*self._draining, self._task], None
        if self._carrier is not None:
            self._carrier.close()
        await cancel_and_wait(*(task for task in tasks if task is not None))
        wide, self._wide_channel = self._wide_channel, None
        if wide is not None:
            await wide.close()

    def _usable_carrier(self) -> Carrier | None:
        carrier = self._carrier
        if carrier is not None and carrier.up:
            if self._version == self._membership.version:
                return carrier
            self._retire(carrier)
        loop = asyncio.get_running_loop()
        if self._task is None and not self._closed and loop.time() >= self._retry_at_s:
            self._task = loop.create_task(self._carry(), name=f"carrier to {self._address}")
            self._task.add_done_callback(self._forget_task)
        return None

    def _retire(self, carrier: Carrier) -> None:
        """Let a carrier with an old certificate keep its streams and take no new ones."""
        self._carrier = None
        if self._task is not None:
            self._draining.add(self._task)
            self._task.add_done_callback(self._draining.discard)
            self._task = None
        draining = asyncio.ensure_future(carrier.drain())
        self._draining.add(draining)
        draining.add_done_callback(self._draining.discard)

    def _forget_task(self, task: "asyncio.Task[None]") -> None:
        if self._task is task:
            self._task = None

    async def _carry(self) -> None:
        wait_s, carrier = RETRY_S, None
        try:
            self._version = self._membership.version
            if self._wide_channel is None:
                self._wide_channel = self._membership.channel(self._address, carries_many=True)
            method: Any = self._wide_channel.stream_stream(RUN_MANY)
            carrier = await open_carrier(method(metadata=await self.peer.metadata()))
            self._carrier = carrier
            self._up.set()
            await carrier.run()
        except (grpc.RpcError, ConnectionError) as error:
            if _code_of(error) is grpc.StatusCode.UNIMPLEMENTED:
                wait_s = UNSERVED_RETRY_S
            log.debug("no carrier to %s: %s", self._address, error)
        finally:
            self.peer.forget()  # another process may answer there next
            if self._carrier is carrier:
                self._carrier = None
                self._up.clear()
                self._retry_at_s = asyncio.get_running_loop().time() + wait_s


def _code_of(error: Exception) -> grpc.StatusCode | None:
    return error.code() if isinstance(error, grpc.aio.AioRpcError) else None


async def close_when_idle(channel: grpc.aio.Channel, connection: CarrierConnection) -> None:
    """Close both once their calls have ended by themselves."""
    await asyncio.gather(connection.drain(), fresh_channel.close_when_idle(channel))
