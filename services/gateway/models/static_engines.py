"""A registry for fleets without etcd: queries a fixed list of engines for their models."""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import grpc
from google.protobuf import json_format

from inferfleet_proto.internal.v1 import engine_pb2, engine_pb2_grpc
from services.common.rpc import Membership
from services.common.tasks import cancel_and_wait

log = logging.getLogger(__name__)

QUERY_EVERY_S = 2.0
QUERY_TIMEOUT_S = 5.0


class StaticEngines:
    """RegistryRecords made of the engines' answers to GetInfo."""

    def __init__(self, addresses: Sequence[str], membership: Membership) -> None:
        self._channels = {address: membership.channel(address) for address in addresses}
        self._peers = {
            address: membership.peer(channel, address, registered=False)
            for address, channel in self._channels.items()
        }
        self._known: dict[str, bytes] = {}
        self._version = 0
        self._changed = asyncio.Condition()
        self._task: asyncio.Task[None] | None = None

    @property
    def connected(self) -> bool:
        """Whether any engine answered the last query."""
        return bool(self._known)

    def snapshot(self) -> Mapping[str, bytes]:
        """Address → EngineInfo as JSON, for the engines that answered the last query."""
        return dict(self._known)

    async def wait_change(self, version: int) -> int:
        """Return the current version as soon as it is newer than `version`."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._version > version)
            return self._version

    async def start(self) -> None:
        """Query all engines once, then repeat in the background."""
        await self._query_all()
        self._task = asyncio.create_task(self._follow())

    async def stop(self) -> None:
        """Stop querying and close the channels; idempotent."""
        if self._task is not None:
            await cancel_and_wait(self._task)
            self._task = None
        for channel in self._channels.values():
            await channel.close()

    async def _follow(self) -> None:
        while True:
            await asyncio.sleep(QUERY_EVERY_S)
            await self._query_all()

    async def _query_all(self) -> None:
        answers = await asyncio.gather(*(self._query(address) for address in self._channels))
        known = {address: value for address, value in answers if value is not None}
        if known != self._known:
            async with self._changed:
                self._known = known
                self._version += 1
                self._changed.notify_all()

    async def _query(self, address: str) -> tuple[str, bytes | None]:
        channel = self._channels[address]
        stub: Any = engine_pb2_grpc.EngineStub(channel)
        try:
            info = await stub.GetInfo(
                engine_pb2.GetInfoRequest(),
                metadata=await self._peers[address].metadata(),
                timeout=QUERY_TIMEOUT_S,
            )
        except grpc.aio.AioRpcError as error:
            self._peers[address].forget()
            log.debug("engine %s does not answer: %s", address, error.details())
            return address, None
        return address, json_format.MessageToJson(info, indent=None).encode()
