"""A peer whose process is stopped keeps its connections open; its callers must notice."""

import asyncio
import signal
import subprocess
import sys
import time

import grpc
import pytest

from services.common.rpc import Membership

SERVER = """
import asyncio
import grpc
from services.common import rpc

async def run(request, context):
    while True:
        await context.write(b"x")
        await asyncio.sleep(0.2)

async def main():
    server = rpc.make_server()
    handlers = {"Run": grpc.unary_stream_rpc_method_handler(run)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("a.B", handlers),))
    print(server.add_insecure_port("127.0.0.1:0"), flush=True)
    await server.start()
    await server.wait_for_termination()

asyncio.run(main())
"""


@pytest.fixture
def peer():
    """A server in a process of its own, and its port."""
    process = subprocess.Popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE, text=True)
    yield process, int(process.stdout.readline())
    process.kill()
    process.wait()
    process.stdout.close()


async def read_to_the_end(call) -> None:
    while await call.read() is not grpc.aio.EOF:
        pass


@pytest.mark.verify
@pytest.mark.parametrize("quiet_s", [0, 40])
async def test_a_stopped_peer_is_given_up(peer, quiet_s):
    """Also on a connection whose caller has sent nothing for long."""
    process, port = peer
    channel = Membership().channel(f"127.0.0.1:{port}")
    call = channel.unary_stream("/a.B/Run")(b"")
    until = time.monotonic() + quiet_s
    while await call.read() == b"x" and time.monotonic() < until:
        pass
    process.send_signal(signal.SIGSTOP)
    async with asyncio.timeout(45):  # grpc's own defaults take more than a minute
        with pytest.raises(grpc.RpcError) as caught:
            await read_to_the_end(call)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    await channel.close()
