"""One open stream from a balancer, and the meaning of its transport errors."""

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

import grpc

from services.common import errors
from services.common.rpc.carrier import RunCall, take_messages
from services.common.tasks import cancel_requested

log = logging.getLogger(__name__)


class BalancerLostError(errors.AbortedError):
    """The connection broke after the first message; another balancer can resume the stream."""


class UnreachableError(errors.UnavailableError):
    """The transport failed, not the balancer: addresses in the message are for the log only."""


class Upstream:
    """One open Run stream whose first message has arrived; messages stay raw bytes.

    Args:
        stall_s: a stream that is silent for longer ends.
    """

    def __init__(
        self, call: RunCall, first: bytes, *, engine_id: str, tries: int, stall_s: float
    ) -> None:
        self._call = call
        self._first: bytes | None = first
        self._stall_s = stall_s
        self._stalled = False
        self._loop = asyncio.get_running_loop()
        self._last_message_s = self._loop.time()
        self._stall_timer: asyncio.TimerHandle | None = None
        self.engine_id = engine_id
        self.tries = tries
        """How often the request has been sent to a balancer, this time included."""

    async def read_messages(self) -> Sequence[bytes]:
        """The messages that have arrived, at least one; none: the stream has ended.

        Raises:
            BalancerLostError: the balancer is gone.
            FleetError: the stream ended with a status, or stalled.
        """
        first, self._first = self._first, None
        if first is not None:
            self._check_progress()
            return (first,)
        try:
            messages = await take_messages(self._call)
            self._last_message_s = self._loop.time()
            return messages
        except grpc.RpcError as error:
            raise stream_error(error) from error
        except asyncio.CancelledError:
            if self._stalled:
                raise errors.AbortedError(
                    f"the stream was silent for {self._stall_s:g} s", reason="STREAM_STALLED"
                ) from None
            raise_if_aborted(self._call)
            raise

    def cancel(self) -> None:
        """Cancel the call; idempotent."""
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None
        self._call.cancel()

    def _check_progress(self) -> None:
        # One timer for the whole stream: a timeout around each read would cost more than the read.
        left_s = self._last_message_s + self._stall_s - self._loop.time()
        if left_s > 0:
            self._stall_timer = self._loop.call_later(left_s, self._check_progress)
        else:
            self._stalled = True
            self._call.cancel()


def raise_if_aborted(call: RunCall) -> None:
    """Tell a peer's status CANCELLED from a cancellation of this task; grpc.aio raises the same.

    Raises:
        CancelledError: the fleet's own; the peer ended the stream and this task is not cancelled.
    """
    if call.done() and not cancel_requested():
        raise errors.CancelledError("the request was aborted") from None


def opening_error(error: grpc.RpcError) -> errors.FleetError:
    """The error of a stream that failed before its first message."""
    return _unreachable(error) or errors.error_of(error)


def stream_error(error: grpc.RpcError) -> errors.FleetError:
    """The error of a stream that failed after its first message."""
    unreachable = _unreachable(error)
    if unreachable is not None:
        log.info("a stream broke: %s", unreachable.message)
        return BalancerLostError("the stream broke: its balancer is gone")
    found = errors.error_of(error)
    if isinstance(found, errors.UnavailableError):
        # The caller has messages already, so this is a broken stream and not a refused request.
        return BalancerLostError(f"the stream broke: {found.message}", metadata=found.metadata)
    return found


def _unreachable(error: grpc.RpcError) -> UnreachableError | None:
    """None if the status is a balancer's own: its statuses carry details in their metadata."""
    failed: Any = error  # grpc.aio.AioRpcError, which is a subclass
    if failed.code() is not grpc.StatusCode.UNAVAILABLE:
        return None
    if errors.DETAILS_KEY in dict(failed.trailing_metadata() or ()):
        return None
    return UnreachableError(str(failed.details()))
