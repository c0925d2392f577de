"""Lists the engines as the balancer sees them, through its Fleet service."""

from typing import Any

import grpc

from inferfleet_cli.errors import CliError
from inferfleet_cli.supervisor.tls import ClientTls
from inferfleet_proto.admin.v1 import fleet_pb2, fleet_pb2_grpc
from services.common.rpc import TOKEN_KEY, Membership

TIMEOUT_S = 2.0


async def list_engines(admin: str, token: str, tls: ClientTls = ClientTls()) -> dict[str, Any]:  # noqa: B008 (it is frozen)
    """{"engines": […]}, with "engines_error" as well if the balancer does not answer."""
    try:
        credentials = tls.credentials()
    except CliError as error:
        return {"engines": [], "engines_error": str(error)}
    made = (
        grpc.aio.insecure_channel(admin)
        if credentials is None
        else grpc.aio.secure_channel(admin, credentials)
    )
    async with made as channel:
        stub = fleet_pb2_grpc.FleetStub(channel)
        try:
            # With TLS the certificate has proven the balancer.
            shown: tuple[tuple[str, str], ...] = ((TOKEN_KEY, token),)
            if credentials is None:
                peer = Membership(token=token).peer(channel, admin, registered=False)
                shown = await peer.metadata(TIMEOUT_S)
            reply = await stub.ListEngines(
                fleet_pb2.ListEnginesRequest(), timeout=TIMEOUT_S, metadata=shown
            )
        except grpc.aio.AioRpcError as error:
            return {"engines": [], "engines_error": f"{error.code().name}: {error.details()}"}
    return {"engines": [engine_json(view) for view in reply.engines]}


def engine_json(view: fleet_pb2.EngineView) -> dict[str, Any]:
    """Convert one engine to the JSON object that `status --json` prints."""
    info, load = view.info, view.load
    return {
        "engine_id": info.engine_id,
        "state": view.state,
        "registered": view.registered,
        "address": info.address,
        "model": info.model,
        "model_revision": info.model_revision,
        "dtype": info.dtype,
        "deterministic": info.deterministic,
        "numerics_id": info.numerics_id,
        "max_model_len": info.max_model_len,
        "block_size": info.block_size,
        "in_flight": view.in_flight,
        "waiting": load.waiting_requests,
        "running": load.running_requests,
        "held_blocks": load.held_blocks,
        "total_blocks": load.total_blocks or info.num_blocks,
        "placement_version": load.placement_version,
        "draining": load.draining or info.draining,
    }
