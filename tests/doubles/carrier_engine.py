"""A peer that serves Run and RunMany as a request says, and a link to it, on real sockets."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc

from inferfleet_proto.internal.v1 import engine_pb2, engine_pb2_grpc
from inferfleet_proto.v1 import inference_pb2
from services.common import errors, rpc
from services.common.rpc.carrier import CarrierConnection, RunMany, take_messages, wait_sent

LIMIT_S = 20


class Peer(engine_pb2_grpc.EngineServicer):
    """Answers as a request's model says; serves RunMany unless it is of the version before."""

    def __init__(self, *, patient: bool = False) -> None:
        self.written: dict[str, int] = {}
        self.running: set[str] = set()
        self.ended: list[str] = []
        self.left: list[float | None] = []
        self.shown: list[dict[str, Any]] = []
        self.conversations = 0
        self.server: grpc.aio.Server | None = None
        self.patient = patient
        self.many = RunMany(
            self.Run,
            parse=engine_pb2.EngineRequest.FromString,
            serialise=inference_pb2.GenerateResponse.SerializeToString,
        )

    async def start(self, address: str = "127.0.0.1:0", *, old: bool = False) -> str:
        self.server = rpc.make_server()
        if old:
            run = grpc.unary_stream_rpc_method_handler(
                self.Run,
                request_deserializer=engine_pb2.EngineRequest.FromString,
                response_serializer=inference_pb2.GenerateResponse.SerializeToString,
            )
            service = "inferfleet.internal.v1.Engine"
            handler = grpc.method_handlers_generic_handler(service, {"Run": run})
            self.server.add_generic_rpc_handlers((handler,))
        else:
            engine_pb2_grpc.add_EngineServicer_to_server(self, self.server)
        port = self.server.add_insecure_port(address)
        await self.server.start()
        return f"127.0.0.1:{port}"

    async def stop(self) -> None:
        if self.server is not None:
            await self.server.stop(0)

    async def RunMany(self, request_iterator: Any, context: Any) -> None:
        self.conversations += 1
        await self.many(request_iterator, context)

    async def Run(self, request: engine_pb2.EngineRequest, context: Any) -> AsyncIterator[Any]:
        name, how = request.request.request_id, request.request.model
        self.shown.append(dict(context.invocation_metadata()))
        self.left.append(rpc.remaining_s(context))
        context.add_done_callback(lambda _: self.ended.append(name))
        self.running.add(name)
        try:
            await context.send_initial_metadata((("engine", f"e-{name}"),))
            if how == "abort":
                await context.abort(grpc.StatusCode.NOT_FOUND, "not here")
            if how == "refuse":
                raise errors.ResourceExhaustedError("full", retry_after_s=3)
            if how == "long":
                yield message_of(name * (rpc.MAX_RECEIVE_BYTES // len(name)), 0)
            if how == "bug":
                raise KeyError("bug")
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
            self.running.discard(name)


def message_of(name: str, number: int) -> inference_pb2.GenerateResponse:
    return inference_pb2.GenerateResponse(
        delta=inference_pb2.Delta(text=f"{name}/{number} ", num_tokens=1)
    )


def request_of(name: str, how: str = "", tokens: int = 10) -> bytes:
    request = engine_pb2.EngineRequest(
        request=inference_pb2.GenerateRequest(request_id=name, model=how)
    )
    request.request.stop.max_tokens = tokens
    return request.SerializeToString()


def whole(name: str, tokens: int = 10) -> list[bytes]:
    return [message_of(name, number).SerializeToString() for number in range(tokens)]


async def until(condition: Callable[[], bool], limit_s: float = LIMIT_S) -> None:
    async with asyncio.timeout(limit_s):
        while not condition():  # noqa: ASYNC110 - what is waited for tells nobody
            await asyncio.sleep(0.005)


class Linked:
    """A peer, and a link to it that carries."""

    def __init__(self, peer: Peer, address: str) -> None:
        self.peer, self.address = peer, address
        self.membership = rpc.Membership()
        self.channel = self.membership.channel(address)
        self.link = CarrierConnection(self.membership, address, self.channel)

    def run(self, request: bytes, **how: Any) -> Any:
        return self.link.run(request, **{"metadata": (), "timeout_s": 30.0, **how})

    async def all_of(self, name: str, tokens: int = 10) -> list[bytes]:
        return [raw async for raw in self.run(request_of(name, "slow", tokens))]


@contextlib.asynccontextmanager
async def linked(peer: Peer, *, old: bool = False) -> AsyncIterator[Linked]:
    made = Linked(peer, await peer.start(old=old))
    try:
        if not old:
            await asyncio.wait_for(made.link.wait_carries(), LIMIT_S)
        yield made
    finally:
        await made.link.close()
        await made.channel.close()
        await peer.stop()


async def read_on(call: Any) -> None:
    """Until the end of a stream."""
    while await take_messages(call):
        pass
