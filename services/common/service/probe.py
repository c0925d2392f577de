"""Checks the gRPC health of a service; the exit status is 0 if it serves.

Run as `python -m services.common.service.probe`. It is the health check of the container images. It
reads the same keys as the service (port, tls_*_file, …) and supports mutual TLS, which a kubelet
does not.
"""

import asyncio
import sys
from dataclasses import dataclass

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.common.config.service_config import ServiceConfig
from services.common.config.settings import ConfigError, load_or_exit, setting
from services.common.rpc import Membership

_ANY = ("0.0.0.0", "[::]", "::", "")


@dataclass(frozen=True)
class ProbeConfig(ServiceConfig):
    """The service to check, in addition to the service's own keys."""

    address: str = setting("", "host:port to check; default: this host and the key port")
    service: str = setting("", "full name of one gRPC service; empty: the server as a whole")
    timeout_s: float = setting(3.0, "time limit of the check", unit="seconds", low=0.1, high=600)


def target(settings: ProbeConfig) -> str:
    """The address to check.

    With TLS it is a name, because certificates name hosts: the certificate must cover `localhost`.
    """
    if settings.address:
        return settings.address
    own = "localhost" if settings.tls_ca_file else "127.0.0.1"
    return f"{own if settings.host in _ANY else settings.host}:{settings.port}"


async def check(settings: ProbeConfig) -> str:
    """The name of the status, e.g. "SERVING", or the error of the call."""
    membership = Membership.from_config(settings)
    request = health_pb2.HealthCheckRequest(service=settings.service)
    async with membership.channel(target(settings)) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        try:
            answer = await stub.Check(request, timeout=settings.timeout_s)
        except grpc.aio.AioRpcError as error:
            return f"{error.code().name}: {error.details()}"
    return str(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))


def main() -> int:
    """Print one line; returns 0 if serving, 1 if not, 2 for an unusable configuration."""
    settings = load_or_exit(
        ProbeConfig,
        sys.argv[1:],
        prog="services.common.service.probe",
        description="Check whether a service of the fleet serves (grpc.health.v1).",
    )
    if not settings.address and settings.port == 0:
        print("services.common.service.probe: port: needed, or address", file=sys.stderr)
        return 2
    try:
        status = asyncio.run(check(settings))
    except ConfigError as error:
        print(f"services.common.service.probe: {error}", file=sys.stderr)
        return 2
    serving = status == "SERVING"
    print(f"{target(settings)} {status}", file=sys.stdout if serving else sys.stderr)
    return 0 if serving else 1


if __name__ == "__main__":
    sys.exit(main())
