"""`status` asks each service for its health: a frozen process is not ready."""

import asyncio
import socket

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from inferfleet_cli.supervisor.health import health_of, with_health
from services.common import rpc
from services.common.rpc.server import LIVENESS

NAMES = ["a.B"]


def service(name, address, state="ready"):
    return {"name": name, "address": address, "state": state}


async def test_the_state_is_what_the_service_answers():
    server = rpc.make_server()
    health = rpc.add_health_and_reflection(server, NAMES)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    # The kernel accepts the connections of a frozen process, which sends nothing.
    with socket.create_server(("127.0.0.1", 0)) as frozen:
        frozen_address = f"127.0.0.1:{frozen.getsockname()[1]}"
        try:
            await rpc.set_health(health, NAMES, serving=True)
            found = await with_health(
                [
                    service("gateway", address),
                    service("balancer", frozen_address),
                    service("engine-1", "", "starting"),
                    service("redis", frozen_address),
                ],
                timeout_s=1,
            )
            assert [one["state"] for one in found] == ["ready", "stalled", "starting", "ready"]
            await rpc.set_health(health, NAMES, serving=False)
            assert await health_of(address) == "not serving"
            async with grpc.aio.insecure_channel(address) as channel:
                request = health_pb2.HealthCheckRequest(service=LIVENESS)
                answer = await health_pb2_grpc.HealthStub(channel).Check(request)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING  # during a drain too
        finally:
            await server.stop(None)


async def test_a_closed_port_is_not_ready():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    assert await health_of(f"127.0.0.1:{port}", timeout_s=2) == "not serving"


async def test_a_server_that_speaks_something_else_is_not_stalled():
    async def hang_up(reader, writer):
        await reader.read(1)
        writer.close()

    server = await asyncio.start_server(hang_up, "127.0.0.1", 0)
    async with server:
        assert await health_of(f"127.0.0.1:{server.sockets[0].getsockname()[1]}") == "ready"
