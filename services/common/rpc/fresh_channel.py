"""A gRPC channel whose certificates may be replaced.

grpc.aio reads a client's certificate once, when the channel is made, and would show it again at
every reconnection, long after it has expired. Here the files are looked at with every call: once
they have changed, calls go over a new connection, while those under way end on the old one.
"""

import asyncio
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import grpc

from services.common.rpc.tls_files import Pems, TlsFiles

# Of the calls that are under way when their connection is replaced.
LONGEST_CALL_S = 24 * 3600.0


class FreshChannel(grpc.aio.Channel):
    """Delegates to the channel of the newest files; owned by the loop that it was made in."""

    def __init__(self, target: str, files: TlsFiles, options: Sequence[tuple[str, Any]]) -> None:
        self._target = target
        self._files = files
        self._options = options
        self._version, pems = files.newest()
        self._inner = self._made(pems)
        self._leaving: set[asyncio.Task[None]] = set()
        self._under_way: weakref.WeakSet[Any] = weakref.WeakSet()
        self._closed = False

    async def __aenter__(self) -> "FreshChannel":
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def close(self, grace: float | None = None) -> None:
        self._closed = True
        leaving = list(self._leaving)
        for task in leaving:
            task.cancel()
        await asyncio.gather(*leaving, return_exceptions=True)
        await self._inner.close(grace)
        # A channel that was told to wait for its calls can not be hurried any more.
        for call in list(self._under_way):
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
        """Stubs keep what they are given for ever: each call asks for the channel anew."""
        made: tuple[grpc.aio.Channel, Any] | None = None

        def call(*arguments: Any, **options: Any) -> Any:
            nonlocal made
            inner = self._newest()
            if made is None or made[0] is not inner:
                made = inner, getattr(inner, kind)(method, *how, **more)
            begun = made[1](*arguments, **options)
            self._under_way.add(begun)
            return begun

        return call

    def _newest(self) -> grpc.aio.Channel:
        version, pems = self._files.newest()
        if version != self._version and not self._closed:
            self._version = version
            old, self._inner = self._inner, self._made(pems)
            task = asyncio.ensure_future(closed_when_idle(old))
            self._leaving.add(task)
            task.add_done_callback(self._leaving.discard)
        return self._inner

    def _made(self, pems: Pems) -> grpc.aio.Channel:
        credentials = grpc.ssl_channel_credentials(pems.ca, pems.key, pems.cert)
        return grpc.aio.secure_channel(self._target, credentials, options=self._options)


async def closed_when_idle(channel: grpc.aio.Channel) -> None:
    """Close a channel once its calls have ended by themselves; without a grace it cancels them."""
    await channel.close(LONGEST_CALL_S)
