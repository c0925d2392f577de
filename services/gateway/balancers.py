"""The way to the engines: which balancer takes a request, and another when it cannot be reached."""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import grpc

from services.common import errors
from services.common.rpc import ENGINE_ID_KEY, Membership
from services.common.rpc.carrier import CarrierConnection, close_when_idle, take_messages
from services.common.tasks import cancel_requested

log = logging.getLogger(__name__)

RETRY_PAUSE_S = 0.1
WARN_EVERY_S = 1.0
# A later try must win over one that a lost balancer may still have running; balancers count on
# from the number they are given.
ATTEMPTS_PER_TRY = 16
_ATTEMPT_TAG = b"\x20"  # field 4 of EngineRequest, as a varint; a later value wins

Metadata = tuple[tuple[str, str | bytes], ...]


class BalancerLostError(errors.AbortedError):
    """The connection broke after the first message; another balancer may carry the stream on."""


class _UnreachableError(errors.UnavailableError):
    """No word of a balancer but of the transport: addresses in it are for the log alone."""


class Upstream:
    """One open Run stream whose first message is here; the messages stay raw bytes."""

    def __init__(
        self, call: Any, first: bytes, *, engine_id: str, tries: int, stall_s: float
    ) -> None:
        self._call = call
        self._first: bytes | None = first
        self._stall_s = stall_s
        self._stalled = False
        self._loop = asyncio.get_running_loop()
        self._heard_s = self._loop.time()
        self._watch: asyncio.TimerHandle | None = None
        self.engine_id = engine_id
        self.tries = tries
        """How often the request has been sent to a balancer, this time included."""

    async def take_messages(self) -> Sequence[bytes]:
        """The messages that are here by now, waiting for one; none: that was the end.

        Raises:
            BalancerLostError: the balancer is gone.
            FleetError: the stream ended with a status, or fell silent.
        """
        first, self._first = self._first, None
        if first is not None:
            self._look()
            return (first,)
        try:
            messages = await take_messages(self._call)
            self._heard_s = self._loop.time()
            return messages
        except grpc.RpcError as error:
            raise _after_start(error) from error
        except asyncio.CancelledError:
            if self._stalled:
                raise errors.AbortedError(
                    f"the stream was silent for {self._stall_s:g} s", reason="STREAM_STALLED"
                ) from None
            raise_if_aborted(self._call)
            raise

    def cancel(self) -> None:
        """Tell the other side that nobody listens any more; idempotent."""
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None
        self._call.cancel()

    def _look(self) -> None:
        # One timer for a whole stream: a timeout around each read would cost more than the read.
        left = self._heard_s + self._stall_s - self._loop.time()
        if left > 0:
            self._watch = self._loop.call_later(left, self._look)
        else:
            self._stalled = True
            self._call.cancel()


class Balancers:
    """Round robin over the balancers that are there now."""

    def __init__(
        self,
        addresses: Callable[[], Sequence[str]],
        membership: Membership,
        *,
        retry_s: float,
        stall_s: float,
    ) -> None:
        self._addresses = addresses
        self._membership = membership
        self._retry_s = retry_s
        self._stall_s = stall_s
        self._channels: dict[str, tuple[grpc.aio.Channel, CarrierConnection]] = {}
        self._leaving: set[asyncio.Task[None]] = set()
        self._turn = 0
        self._silent_until: dict[str, float] = {}

    async def open(
        self, wire: bytes, metadata: Metadata, deadline_s: float, *, tries: int = 0
    ) -> Upstream:
        """Send a serialised EngineRequest and wait for the first message.

        Args:
            wire: the message.
            metadata: sent along, beside the fleet's token.
            deadline_s: when the request is worth nothing any more, by time.monotonic().
            tries: how often it has been sent before.

        Raises:
            FleetError: what the balancer answered, or UnavailableError if none can be reached.
        """
        give_up = time.monotonic() + self._retry_s
        first = tries
        problem = errors.UnavailableError("no balancer is known", retry_after_s=1)
        while True:
            for address in self._order():
                try:
                    return await self._try(
                        address, wire, metadata, deadline_s - time.monotonic(), tries
                    )
                except errors.UnavailableError as error:
                    self._warn(address, error.message)
                    problem = error
                tries += 1
            if problem.retry_after_s is not None and tries > first:
                raise problem  # said by a balancer that works: no engine takes it
            if time.monotonic() >= give_up:
                if isinstance(problem, _UnreachableError):
                    raise errors.UnavailableError(
                        "no balancer can be reached; try again", retry_after_s=1
                    ) from problem
                problem.retry_after_s = 1
                raise problem
            await asyncio.sleep(RETRY_PAUSE_S)

    async def close(self) -> None:
        """Close all channels; idempotent."""
        leaving = list(self._leaving)
        for task in leaving:
            task.cancel()
        await asyncio.gather(*leaving, return_exceptions=True)
        channels, self._channels = self._channels, {}
        for channel, link in channels.values():
            await link.close()
            await channel.close()

    def prepare(self) -> None:
        """Connect to those that are there."""
        for address in self._addresses():
            self._channel(address)[1].prepare()

    async def wait_carried(self) -> None:
        """Return once requests to all that are there will share a call with others."""
        for address in self._addresses():
            await self._channel(address)[1].wait_carries()

    async def forget_absent(self) -> None:
        """Close the channels of balancers that are no longer there."""
        present = set(self._addresses())
        for address in [a for a in self._channels if a not in present]:
            # Closing cancels: one that drains has streams, which are to end by themselves.
            task = asyncio.ensure_future(close_when_idle(*self._channels.pop(address)))
            self._leaving.add(task)
            task.add_done_callback(self._leaving.discard)
            self._silent_until.pop(address, None)

    def _warn(self, address: str, message: str) -> None:
        """Once a second: every stream of a balancer that restarts comes here, again and again."""
        now = time.monotonic()
        if now >= self._silent_until.get(address, 0.0):
            self._silent_until[address] = now + WARN_EVERY_S
            log.warning("balancer %s: %s", address, message)

    def _order(self) -> list[str]:
        addresses = list(self._addresses())
        if not addresses:
            return []
        self._turn = (self._turn + 1) % len(addresses)
        order = addresses[self._turn :] + addresses[: self._turn]
        return sorted(order, key=self._is_failing)

    def _is_failing(self, address: str) -> bool:
        state = self._channel(address)[0].get_state()
        return state is grpc.ChannelConnectivity.TRANSIENT_FAILURE

    def _channel(self, address: str) -> tuple[grpc.aio.Channel, CarrierConnection]:
        known = self._channels.get(address)
        if known is None:
            channel = self._membership.channel(address)
            known = channel, CarrierConnection(self._membership, address, channel)
            self._channels[address] = known
        return known

    async def _try(
        self, address: str, wire: bytes, metadata: Metadata, timeout_s: float, tries: int
    ) -> Upstream:
        _, link = self._channel(address)
        call = link.run(_numbered(wire, tries), metadata=metadata, timeout_s=timeout_s)
        try:
            first = await call.read()
            if first is grpc.aio.EOF:
                raise _UnreachableError("it ended the stream unanswered")
            engine_id = dict(await call.initial_metadata()).get(ENGINE_ID_KEY, "")
        except grpc.RpcError as error:
            raise _unreachable(error) or errors.error_of(error) from error
        except asyncio.CancelledError:
            raise_if_aborted(call)
            call.cancel()
            raise
        return Upstream(
            call, first, engine_id=str(engine_id), tries=tries + 1, stall_s=self._stall_s
        )


def raise_if_aborted(call: Any) -> None:
    """grpc.aio shows a peer's status CANCELLED as if our own task had been cancelled.

    Raises:
        CancelledError: the fleet's own, if the peer ended the stream and nobody cancelled us.
    """
    if call.done() and not cancel_requested():
        raise errors.CancelledError("the request was aborted") from None


def _numbered(wire: bytes, attempt: int) -> bytes:
    if attempt == 0:
        return wire
    return wire + _ATTEMPT_TAG + _varint(attempt * ATTEMPTS_PER_TRY)


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _unreachable(error: grpc.RpcError) -> _UnreachableError | None:
    """None if a balancer itself said it: its statuses carry details."""
    known: Any = error
    if known.code() is not grpc.StatusCode.UNAVAILABLE:
        return None
    if errors.DETAILS_KEY in dict(known.trailing_metadata() or ()):
        return None
    return _UnreachableError(str(known.details()))


def _after_start(error: grpc.RpcError) -> errors.FleetError:
    gone = _unreachable(error)
    if gone is not None:
        log.info("a stream broke: %s", gone.message)
        return BalancerLostError("the stream broke: its balancer is gone")
    found = errors.error_of(error)
    if isinstance(found, errors.UnavailableError):
        # To the caller that is a broken stream, not a refused one.
        return BalancerLostError(f"the stream broke: {found.message}", metadata=found.metadata)
    return found
