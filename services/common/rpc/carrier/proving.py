"""A call of Run that begins once its peer has proven that it belongs to the fleet."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

from services.common.rpc.carrier.surface import Pairs, RunCall
from services.common.rpc.proof import Peer, deadline_error


class ProvingCall:
    """Stands in for a call of grpc.aio; ends and fails as one does.

    Args:
        begin: makes the call itself, of `metadata` and `timeout`.
        metadata: added to the proof of membership.
    """

    def __init__(
        self, peer: Peer, begin: Callable[..., RunCall], metadata: Pairs, timeout_s: float | None
    ) -> None:
        self._begun: RunCall | None = None
        self._task = asyncio.ensure_future(self._begin(peer, begin, metadata, timeout_s))
        self._task.add_done_callback(_retrieve_error)

    def done(self) -> bool:
        """Whether the call has ended; messages may still be there to read."""
        return self._task.done() if self._begun is None else self._begun.done()

    def cancelled(self) -> bool:
        """Whether the caller cancelled it."""
        return self._task.cancelled() if self._begun is None else self._begun.cancelled()

    def cancel(self) -> bool:
        """End the call from the caller's side; returns False if it has ended already."""
        return self._task.cancel() if self._begun is None else self._begun.cancel()

    async def initial_metadata(self) -> Any:
        """The other side's initial metadata; raises as `read`."""
        return await (await self._task).initial_metadata()

    async def read(self) -> Any:
        """The next message, or `grpc.aio.EOF`.

        Raises:
            grpc.aio.AioRpcError: the peer is unproven, or the call ended with another status.
            CancelledError: the call was cancelled.
        """
        return await (await self._task).read()

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for message in await self._task:
            yield message

    async def _begin(
        self, peer: Peer, begin: Callable[..., RunCall], metadata: Pairs, timeout_s: float | None
    ) -> RunCall:
        loop = asyncio.get_running_loop()
        end_s = None if timeout_s is None else loop.time() + timeout_s
        try:
            async with asyncio.timeout_at(end_s):
                shown = await peer.metadata()
        except TimeoutError:
            raise deadline_error() from None
        left_s = None if end_s is None else end_s - loop.time()
        self._begun = begin(metadata=(*shown, *metadata), timeout=left_s)
        return self._begun


def _retrieve_error(task: "asyncio.Task[RunCall]") -> None:
    """A call that nobody reads fails silently."""
    if not task.cancelled():
        task.exception()
