"""A gRPC channel that follows replaced certificates.

grpc.aio reads a client's certificate once, when the channel is made, and presents it at every
reconnection, even after it has expired. This channel checks the files with every call. Once they
have changed, new calls use a new connection, and running ones end on the old connection.
"""

import asyncio
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import grpc

from services.common.rpc.tls_files import Pems, TlsFiles
from services.common.tasks import cancel_and_wait

LONGEST_CALL_S = 24 * 3600.0
"""How long calls may still run on a connection that has been replaced."""


class FreshChannel(grpc.aio.Channel):
    """Delegates to a channel with the newest certificates; used in the loop it was made in."""

    def __init__(self, target: str, files: TlsFiles, options: Sequence[tuple[str, Any]]) -> None:
        self._target = target
        self._files = files
        self._options = options
        self._version, pems = files.newest()
        self._inner = self._make(pems)
        self._closing: set[asyncio.Task[None]] = set()
        self._running: weakref.WeakSet[Any] = weakref.WeakSet()
        self._closed = False

    async def __aenter__(self) -> "FreshChannel":
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def close(self, grace: float | None = None) -> None:
        self._closed = True
        await cancel_and_wait(*self._closing)
        await self._inner.close(grace)
        # A channel that is closing with a grace cannot be closed faster any more.
        for call in list(self._running):
            call.cancel()

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        return self._inner.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        await self._inner.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        await self._newest().channel_ready()

    def unary_unary(self, method: str, *how: Any, **more: Any) -> Any:
        return self._calls("unary_unary", method, how, more)

    def unary_stream(self, method: str, *how: Any, **more: Any) -> Any:
        return self._calls("unary_stream", method, how, more)

    def stream_unary(self, method: str, *how: Any, **more: Any) -> Any:
        return self._calls("stream_unary", method, how, more)

    def stream_stream(self, method: str, *how: Any, **more: Any) -> Any:
        return self._calls("stream_stream", method, how, more)

    def _calls(
        self, kind: str, method: str, how: tuple[Any, ...], more: dict[str, Any]
    ) -> Callable[..., Any]:
        """A callable for stubs, which keep it: each call uses the channel that is newest then."""
        made: tuple[grpc.aio.Channel, Any] | None = None

        def call(*arguments: Any, **options: Any) -> Any:
            nonlocal made
            inner = self._newest()
            if made is None or made[0] is not inner:
                made = inner, getattr(inner, kind)(method, *how, **more)
            begun = made[1](*arguments, **options)
            self._running.add(begun)
            return begun

        return call

    def _newest(self) -> grpc.aio.Channel:
        version, pems = self._files.newest()
        if version != self._version and not self._closed:
            self._version = version
            old, self._inner = self._inner, self._make(pems)
            task = asyncio.ensure_future(close_when_idle(old))
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)
        return self._inner

    def _make(self, pems: Pems) -> grpc.aio.Channel:
        credentials = grpc.ssl_channel_credentials(pems.ca, pems.key, pems.cert)
        return grpc.aio.secure_channel(self._target, credentials, options=self._options)


async def close_when_idle(channel: grpc.aio.Channel) -> None:
    """Close a channel once its calls have ended by themselves; without a grace it cancels them."""
    await channel.close(LONGEST_CALL_S)
