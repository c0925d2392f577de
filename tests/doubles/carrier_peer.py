"""The two ends of a carrier on real sockets: a fake engine that streams, and a connection to it."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc

from inferfleet_proto.internal.v1 import engine_pb2
from inferfleet_proto.v1 import inference_pb2
from services.common import errors, rpc
from services.common.rpc.carrier import CarrierConnection, take_messages, wait_sent
from tests.doubles.fake_engine import FakeEngine
from tests.doubles.scripts import Event

LIMIT_S = 20


class CarrierPeer(FakeEngine):
    """Streams numbered messages; the model's name in a request selects how the stream ends.

    "" ends well, "slow" lets others run after each message, "hang" never ends, "refuse", "abort"
    and "bug" fail, "long" has a message over the limit.

    Args:
        patient: wait after each message until it was sent.
    """

    def __init__(self, *, patient: bool = False, serves_many: bool = True) -> None:
        super().__init__(serves_many=serves_many)
        self.patient = patient
        self.written: dict[str, int] = {}
        """Number of the last message by request id."""
        self.open_requests: set[str] = set()
        self.ended: list[str] = []
        """Ids of requests whose call is over."""

    async def Run(self, request: engine_pb2.EngineRequest, context: Any) -> AsyncIterator[Event]:
        name, how = request.request.request_id, request.request.model
        self.record_run(request, context)
        context.add_done_callback(lambda _: self.ended.append(name))
        self.open_requests.add(name)
        try:
            await context.send_initial_metadata((("engine", f"e-{name}"),))
            await _fail(how, context)
            if how == "long":
                yield message_of(name * (rpc.MAX_RECEIVE_BYTES // len(name)), 0)
            for number in range(request.request.stop.max_tokens):
                self.written[name] = number
                yield message_of(name, number)
                if self.patient:
                    await wait_sent(context)
                if how == "slow":
                    await asyncio.sleep(0)
            if how == "hang":
                await asyncio.Event().wait()
        finally:
            self.open_requests.discard(name)


async def _fail(how: str, context: Any) -> None:
    if how == "abort":
        await context.abort(grpc.StatusCode.NOT_FOUND, "not here")
    if how == "refuse":
        raise errors.ResourceExhaustedError("full", retry_after_s=3)
    if how == "bug":
        raise KeyError("bug")


def message_of(name: str, number: int) -> Event:
    """The message with this number in the stream of a request."""
    return Event(delta=inference_pb2.Delta(text=f"{name}/{number} ", num_tokens=1))


def request_of(name: str, how: str = "", tokens: int = 10) -> bytes:
    """A serialised request for so many messages."""
    request = engine_pb2.EngineRequest(
        request=inference_pb2.GenerateRequest(request_id=name, model=how)
    )
    request.request.stop.max_tokens = tokens
    return request.SerializeToString()


def whole(name: str, tokens: int = 10) -> list[bytes]:
    """All messages of a request's stream, serialised."""
    return [message_of(name, number).SerializeToString() for number in range(tokens)]


async def until(condition: Callable[[], bool], limit_s: float = LIMIT_S) -> None:
    """Wait until the condition holds."""
    async with asyncio.timeout(limit_s):
        while not condition():  # noqa: ASYNC110 - nothing notifies of these conditions
            await asyncio.sleep(0.005)


class Linked:
    """A peer and a connection to it."""

    def __init__(self, peer: CarrierPeer) -> None:
        self.peer, self.address = peer, peer.address
        self.membership = rpc.Membership()
        self.channel = self.membership.channel(self.address)
        self.link = CarrierConnection(self.membership, self.address, self.channel)

    def run(self, request: bytes, **options: Any) -> Any:
        """Start a stream."""
        return self.link.run(request, **{"metadata": (), "timeout_s": 30.0, **options})

    async def all_of(self, name: str, tokens: int = 10) -> list[bytes]:
        """All messages of one stream."""
        return [raw async for raw in self.run(request_of(name, "slow", tokens))]


@contextlib.asynccontextmanager
async def linked(peer: CarrierPeer) -> AsyncIterator[Linked]:
    """Start the peer and connect to it; wait for the carrier if the peer serves one."""
    await peer.start()
    made = Linked(peer)
    try:
        if peer.serves_many:
            await asyncio.wait_for(made.link.wait_carries(), LIMIT_S)
        yield made
    finally:
        await made.link.close()
        await made.channel.close()
        await peer.stop()


async def read_to_end(call: Any) -> None:
    """Read a stream and drop its messages."""
    while await take_messages(call):
        pass
