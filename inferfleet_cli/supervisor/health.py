"""Calls the health of the fleet's services: a process that runs may still stand still."""

import asyncio
from collections.abc import Sequence
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

TIMEOUT_S = 3.0
STALLED, NOT_SERVING = "stalled", "not serving"
STORES = ("redis", "etcd")


async def with_health(
    services: Sequence[dict[str, Any]], timeout_s: float = TIMEOUT_S
) -> list[dict[str, Any]]:
    """The services of `status`, with the state that each ready one reports itself.

    Args:
        services: one object per process, as `Fleet.status` makes them.
        timeout_s: without an answer within it the state is "stalled".
    """
    return list(await asyncio.gather(*(_with_health(one, timeout_s) for one in services)))


async def _with_health(service: dict[str, Any], timeout_s: float) -> dict[str, Any]:
    if service["state"] != "ready" or service["name"] in STORES or not service["address"]:
        return service
    return {**service, "state": await health_of(service["address"], timeout_s)}


async def health_of(address: str, timeout_s: float = TIMEOUT_S) -> str:
    """ "ready", "stalled" or "not serving".

    A server with TLS cannot answer this call, which has none: it is "ready" if its port is open.
    """
    async with grpc.aio.insecure_channel(address) as channel:
        try:
            answer = await health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(), timeout=timeout_s
            )
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                return STALLED
            return "ready" if await _is_open(address, timeout_s) else NOT_SERVING
    serving = answer.status == health_pb2.HealthCheckResponse.SERVING
    return "ready" if serving else NOT_SERVING


async def _is_open(address: str, timeout_s: float) -> bool:
    host, _, port = address.rpartition(":")
    try:
        async with asyncio.timeout(timeout_s):
            _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
            writer.close()
            await writer.wait_closed()
    except (OSError, TimeoutError):
        return False
    return True
