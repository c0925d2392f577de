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

    An error other than a timeout counts as ready: the event loop has answered. A server with TLS
    answers this call without TLS so.
    """
    async with grpc.aio.insecure_channel(address) as channel:
        try:
            answer = await health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(), timeout=timeout_s
            )
        except grpc.aio.AioRpcError as error:
            late = error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            return STALLED if late else "ready"
    serving = answer.status == health_pb2.HealthCheckResponse.SERVING
    return "ready" if serving else NOT_SERVING
