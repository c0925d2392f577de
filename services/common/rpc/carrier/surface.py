"""The part of gRPC's calls and contexts that the fleet uses for Run.

A carried stream is no call of gRPC's own: `CarriedCall` and `CarriedContext` stand in for one.
Handlers and readers are typed by these protocols, so mypy rejects a use of anything else.
"""

from collections.abc import AsyncIterator, Sequence
from typing import Any, NoReturn, Protocol

import grpc

Pairs = Sequence[tuple[str, str | bytes]]
"""Metadata: (key, value) in the order of sending."""


class RunContext(Protocol):
    """What a handler of Run may use of its `grpc.aio.ServicerContext`."""

    def invocation_metadata(self) -> Any:
        """The caller's metadata, as (key, value) pairs; None for none."""

    def time_remaining(self) -> float | None:
        """Seconds until the caller's deadline; None if it set none."""

    def peer(self) -> str:
        """The caller's address."""

    def cancelled(self) -> bool:
        """Whether the stream is over."""

    def done(self) -> bool:
        """Whether the stream is over."""

    def add_done_callback(self, callback: Any, /) -> None:
        """Call `callback` with the context once the stream is over."""

    async def send_initial_metadata(self, pairs: Any, /) -> None:
        """Send initial metadata, before the first message."""

    async def write(self, message: Any, /) -> None:
        """Send a message; return when the reader is ready for the next one."""

    async def abort(
        self, code: grpc.StatusCode, details: str = "", trailers: Any = (), /
    ) -> NoReturn:
        """End the stream with a status."""


class RunCall(Protocol):
    """What a caller of Run may use of its `grpc.aio.UnaryStreamCall`; messages are bytes."""

    def done(self) -> bool:
        """Whether the call has ended; messages may still be there to read."""

    def cancelled(self) -> bool:
        """Whether the caller cancelled it."""

    def cancel(self) -> bool:
        """End the call from the caller's side; returns False if it has ended already."""

    async def initial_metadata(self) -> Any:
        """The other side's initial metadata."""

    async def read(self) -> Any:
        """The next message, or `grpc.aio.EOF`.

        Raises:
            grpc.aio.AioRpcError: the call ended with another status than OK.
            CancelledError: the call was cancelled.
        """

    def __aiter__(self) -> AsyncIterator[bytes]:
        """The remaining messages; raises as `read`."""
