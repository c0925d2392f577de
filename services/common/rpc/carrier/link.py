"""Run at one peer: carried with others in one call where that is up, else a call of its own."""

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from typing import Any

import grpc

from services.common.rpc import Membership
from services.common.rpc.carrier.carrier import RUN_MANY, Carrier, begun
from services.common.rpc.fresh_channel import closed_when_idle
from services.common.tasks import cancel_and_wait

log = logging.getLogger(__name__)

RUN = "/inferfleet.internal.v1.Engine/Run"
AGAIN_S = 1.0
UNSERVED_S = 30.0
"""How long a peer that does not know RunMany is left alone: it may be replaced by one that does."""
# A longer request would hold the others up.
MAX_CARRIED_BYTES = 1024 * 1024


class Link:
    """Owned by whoever owns the channel; begins a carrier with the first call, and after a while
    another when one was lost. No call ever waits for it.

    Args:
        channel: to the peer.
    """

    def __init__(self, membership: Membership, address: str, channel: grpc.aio.Channel) -> None:
        self._membership = membership
        self._address = address
        self._run: Any = channel.unary_stream(RUN)  # no serialisers: raw bytes both ways
        self._wide: grpc.aio.Channel | None = None
        self._carrier: Carrier | None = None
        self._version = 0
        self._again_s = 0.0
        self._task: asyncio.Task[None] | None = None
        self._leaving: set[asyncio.Task[None]] = set()
        self._closed = False
        self._up = asyncio.Event()

    def run(
        self,
        request: bytes,
        *,
        metadata: Sequence[tuple[str, str | bytes]],
        timeout_s: float | None,
    ) -> Any:
        """The call; its messages are bytes.

        Args:
            metadata: beside the fleet's token.
        """
        carrier = self._ready()
        if carrier is not None and len(request) <= MAX_CARRIED_BYTES:
            return carrier.open(request, metadata, timeout_s)
        sent = (*self._membership.metadata, *metadata)
        return self._run(request, metadata=sent, timeout=timeout_s)

    def prepare(self) -> None:
        """Begin a carrier if there is none, so that the calls to come need not do without."""
        self._ready()

    @property
    def carries(self) -> bool:
        """Whether the next call will be carried."""
        return self._carrier is not None and self._carrier.up

    async def wait_carries(self) -> None:
        """Return once `carries`; begins a carrier, and begins again as calls would."""
        while not self.carries:
            self.prepare()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._up.wait(), AGAIN_S)

    async def leave(self) -> None:
        """Take no new call and close once those that run have ended by themselves."""
        self._closed = True
        carrier, self._carrier = self._carrier, None
        if carrier is not None:
            await carrier.leave()
        await self.close()

    async def close(self) -> None:
        """Close at once; idempotent. Carried calls are cancelled."""
        self._closed = True
        tasks, self._task = [*self._leaving, self._task], None
        if self._carrier is not None:
            self._carrier.close()
        for task in tasks:
            if task is not None:
                await cancel_and_wait(task)
        wide, self._wide = self._wide, None
        if wide is not None:
            await wide.close()

    def _ready(self) -> Carrier | None:
        carrier = self._carrier
        if carrier is not None and carrier.up:
            if self._version == self._membership.version:
                return carrier
            self._retire(carrier)
        loop = asyncio.get_running_loop()
        if self._task is None and not self._closed and loop.time() >= self._again_s:
            self._task = loop.create_task(self._carry(), name=f"carrier to {self._address}")
            self._task.add_done_callback(self._over)
        return None

    def _retire(self, carrier: Carrier) -> None:
        """Its certificate is an old one: streams that it has end there, new ones go elsewhere."""
        self._carrier = None
        if self._task is not None:
            self._leaving.add(self._task)
            self._task.add_done_callback(self._leaving.discard)
            self._task = None
        leaving = asyncio.ensure_future(carrier.leave())
        self._leaving.add(leaving)
        leaving.add_done_callback(self._leaving.discard)

    def _over(self, task: "asyncio.Task[None]") -> None:
        if self._task is task:
            self._task = None

    async def _carry(self) -> None:
        wait_s, carrier = AGAIN_S, None
        try:
            self._version = self._membership.version
            if self._wide is None:
                self._wide = self._membership.channel(self._address, carries_many=True)
            method: Any = self._wide.stream_stream(RUN_MANY)
            carrier = await begun(method(metadata=self._membership.metadata))
            self._carrier = carrier
            self._up.set()
            await carrier.run()
        except (grpc.RpcError, ConnectionError) as error:
            if _code_of(error) is grpc.StatusCode.UNIMPLEMENTED:
                wait_s = UNSERVED_S
            log.debug("no carrier to %s: %s", self._address, error)
        finally:
            if self._carrier is carrier:
                self._carrier = None
                self._up.clear()
                self._again_s = asyncio.get_running_loop().time() + wait_s


def _code_of(error: Exception) -> grpc.StatusCode | None:
    return error.code() if isinstance(error, grpc.aio.AioRpcError) else None


async def closed_with(channel: grpc.aio.Channel, link: Link) -> None:
    """Close both once their calls have ended by themselves."""
    await asyncio.gather(link.leave(), closed_when_idle(channel))
