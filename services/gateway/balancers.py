"""Opens streams at balancers: in turn, and at another one if a balancer cannot be reached."""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence

import grpc

from services.common import errors
from services.common.rpc import ENGINE_ID_KEY, Membership
from services.common.rpc.carrier import CarrierConnection, close_when_idle
from services.common.tasks import cancel_and_wait
from services.gateway.upstream import (
    UnreachableError,
    Upstream,
    opening_error,
    raise_if_aborted,
)

log = logging.getLogger(__name__)

RETRY_PAUSE_S = 0.1
WARN_EVERY_S = 1.0
# A later try must replace one that a lost balancer may still have running. Balancers count their
# own attempts upwards from the number that they receive.
ATTEMPTS_PER_TRY = 16
_ATTEMPT_TAG = b"\x20"  # protobuf field 4 of EngineRequest, a varint; the last value counts

Metadata = tuple[tuple[str, str | bytes], ...]


class Balancers:
    """Round robin over the current balancers.

    Args:
        addresses: returns host:port of the current balancers.
        registered: whether the addresses come from the registry.
        retry_s: how long to look for a balancer that can be reached.
        stall_s: a stream that is silent for longer after its first message ends.
    """

    def __init__(
        self,
        addresses: Callable[[], Sequence[str]],
        membership: Membership,
        *,
        retry_s: float,
        stall_s: float,
        registered: bool = False,
    ) -> None:
        self._addresses = addresses
        self._registered = registered
        self._membership = membership
        self._retry_s = retry_s
        self._stall_s = stall_s
        self._connections: dict[str, tuple[grpc.aio.Channel, CarrierConnection]] = {}
        self._closing: set[asyncio.Task[None]] = set()
        """Connections to absent balancers, which close when their streams have ended."""
        self._next = 0
        self._silent_until_s: dict[str, float] = {}

    async def open(
        self, wire: bytes, metadata: Metadata, deadline_s: float, *, tries: int = 0
    ) -> Upstream:
        """Send a request and wait for the first message.

        Args:
            wire: a serialised EngineRequest.
            metadata: sent in addition to the proof of membership.
            deadline_s: of the request, by time.monotonic().
            tries: how often the request has been sent before.

        Raises:
            FleetError: the balancer's answer, or UnavailableError if none can be reached.
        """
        give_up_s = time.monotonic() + self._retry_s
        first = tries
        problem = errors.UnavailableError("no balancer is registered", retry_after_s=1)
        while True:
            for address in self._ordered_addresses():
                timeout_s = deadline_s - time.monotonic()
                try:
                    return await self._open_at(address, wire, metadata, timeout_s, tries)
                except errors.UnavailableError as error:
                    self._warn(address, error.message)
                    problem = error
                tries += 1
            if problem.retry_after_s is not None and tries > first:
                raise problem  # a working balancer's own answer: no engine accepts the request
            if time.monotonic() >= give_up_s:
                if isinstance(problem, UnreachableError):
                    raise errors.UnavailableError(
                        "no balancer can be reached; try again", retry_after_s=1
                    ) from problem
                problem.retry_after_s = 1
                raise problem
            await asyncio.sleep(RETRY_PAUSE_S)

    async def close(self) -> None:
        """Close all connections; idempotent."""
        await cancel_and_wait(*self._closing)
        connections, self._connections = self._connections, {}
        for channel, connection in connections.values():
            await connection.close()
            await channel.close()

    def prepare(self) -> None:
        """Connect to all current balancers, without waiting."""
        for address in self._addresses():
            self._connect(address)[1].prepare()

    async def wait_carried(self) -> None:
        """Return once requests to every current balancer share one call (see docs/adr/0011)."""
        for address in self._addresses():
            await self._connect(address)[1].wait_carries()

    async def forget_absent(self) -> None:
        """Close the connections to balancers that are no longer registered."""
        present = set(self._addresses())
        for address in [a for a in self._connections if a not in present]:
            # Closing at once would cancel the streams of a balancer that is draining.
            task = asyncio.ensure_future(close_when_idle(*self._connections.pop(address)))
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)
            self._silent_until_s.pop(address, None)

    def _warn(self, address: str, message: str) -> None:
        """Log at most once a second: each stream of a restarting balancer fails several times."""
        now = time.monotonic()
        if now >= self._silent_until_s.get(address, 0.0):
            self._silent_until_s[address] = now + WARN_EVERY_S
            log.warning("balancer %s: %s", address, message)

    def _ordered_addresses(self) -> list[str]:
        """The next balancer first; those whose connection is failing last."""
        addresses = list(self._addresses())
        if not addresses:
            return []
        self._next = (self._next + 1) % len(addresses)
        order = addresses[self._next :] + addresses[: self._next]
        return sorted(order, key=self._is_failing)

    def _is_failing(self, address: str) -> bool:
        state = self._connect(address)[0].get_state()
        return state is grpc.ChannelConnectivity.TRANSIENT_FAILURE

    def _connect(self, address: str) -> tuple[grpc.aio.Channel, CarrierConnection]:
        existing = self._connections.get(address)
        if existing is not None:
            return existing
        channel = self._membership.channel(address)
        made = (
            channel,
            CarrierConnection(self._membership, address, channel, registered=self._registered),
        )
        self._connections[address] = made
        return made

    async def _open_at(
        self, address: str, wire: bytes, metadata: Metadata, timeout_s: float, tries: int
    ) -> Upstream:
        _, connection = self._connect(address)
        request = _with_attempt(wire, tries)
        call = connection.run(request, metadata=metadata, timeout_s=timeout_s)
        try:
            first = await call.read()
            if first is grpc.aio.EOF:
                raise UnreachableError("the stream ended without a message")
            engine_id = dict(await call.initial_metadata()).get(ENGINE_ID_KEY, "")
        except grpc.RpcError as error:
            raise opening_error(error) from error
        except asyncio.CancelledError:
            raise_if_aborted(call)
            call.cancel()
            raise
        return Upstream(
            call, first, engine_id=str(engine_id), tries=tries + 1, stall_s=self._stall_s
        )


def _with_attempt(wire: bytes, tries: int) -> bytes:
    """The EngineRequest with its `attempt` set; appending a field replaces its value."""
    if tries == 0:
        return wire
    return wire + _ATTEMPT_TAG + _varint(tries * ATTEMPTS_PER_TRY)


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
