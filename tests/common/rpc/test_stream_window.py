"""How far a stream runs ahead of its reader, and that longer messages pass all the same."""

import asyncio
from collections.abc import AsyncIterator

import grpc
import pytest

from services.common import rpc

MESSAGE = bytes(50)


class Source:
    """Streams as fast as flow control allows, or sends one message of the requested length."""

    def __init__(self) -> None:
        self.sent = 0

    async def stream(self, request: bytes, context: object) -> AsyncIterator[bytes]:
        if request:
            yield bytes(int(request))
            return
        while self.sent < 100_000:
            yield MESSAGE
            self.sent += 1


@pytest.fixture
async def source() -> AsyncIterator[tuple[Source, str]]:
    made, server = Source(), rpc.make_server()
    handlers = {"Stream": grpc.unary_stream_rpc_method_handler(made.stream)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test", handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield made, f"127.0.0.1:{port}"
    await server.stop(0)


async def test_a_stream_waits_for_its_reader(source):
    made, address = source
    async with rpc.Membership().channel(address) as channel:
        call = channel.unary_stream("/test/Stream")(b"")
        await call.read()
        before = -1
        while made.sent != before:  # until it stands still
            before = made.sent
            await asyncio.sleep(0.2)
        assert made.sent * len(MESSAGE) < 10_000, "what is not read was not sent"
        for _ in range(500):
            assert await call.read() == MESSAGE
        assert made.sent >= 500
        call.cancel()


async def test_a_message_longer_than_the_window_passes(source):
    _, address = source
    async with rpc.Membership().channel(address) as channel:
        size = 4 * 1024 * 1024 - 64
        messages = [len(m) async for m in channel.unary_stream("/test/Stream")(b"%d" % size)]
    assert messages == [size]
