"""Serves admin.v1.Fleet: operators list engines, drain them and look up routing decisions."""

import asyncio
import time
from collections.abc import Callable
from typing import Any

import grpc

from inferfleet_proto.admin.v1 import fleet_pb2, fleet_pb2_grpc
from inferfleet_proto.internal.v1 import engine_pb2, engine_pb2_grpc
from services.balancer.engines.member import Member
from services.balancer.engines.registry import EngineRegistry
from services.balancer.routing.decision_ledger import DecisionLedger
from services.common import errors

SERVICE_NAME = "inferfleet.admin.v1.Fleet"
# Time that an engine needs to answer after the grace is over.
_DRAIN_SLACK_S = 5.0
MAX_GRACE_S = 3600.0


class FleetServicer(fleet_pb2_grpc.FleetServicer):
    """Served on the admin port only.

    Args:
        changed: called after an engine was taken out of routing.
        clock: the registry's clock.
    """

    def __init__(
        self,
        registry: EngineRegistry,
        decisions: DecisionLedger,
        changed: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._registry = registry
        self._decisions = decisions
        self._changed = changed
        self._clock = clock

    async def ListEngines(
        self, request: fleet_pb2.ListEnginesRequest, context: Any
    ) -> fleet_pb2.ListEnginesResponse:
        """All engines in the view, in any state."""
        now = self._clock()
        return fleet_pb2.ListEnginesResponse(
            engines=[
                fleet_pb2.EngineView(
                    info=member.info,
                    load=member.load,
                    in_flight=member.in_flight,
                    state=member.state(now).value,
                    registered=member.registered,
                )
                for member in self._registry.members()
            ]
        )

    async def Drain(
        self, request: fleet_pb2.DrainEngineRequest, context: Any
    ) -> fleet_pb2.DrainEngineResponse:
        """Take the engine out of routing at once, then let it finish its streams."""
        _check_grace(request.grace_s)
        member = self._registry.member(request.engine_id)
        if member is None:
            raise errors.NotFoundError(
                f"engine_id: no engine {request.engine_id[:128]!r}", reason="ENGINE_NOT_FOUND"
            )
        member.order_drain()
        self._changed()
        try:
            result = await self._drain(member, request.grace_s)
        except grpc.RpcError as error:
            # The engine gets no new work in any case. The operator may try again.
            raise errors.UnavailableError(
                f"engine {request.engine_id} is out of routing but did not drain: "
                f"{errors.error_of(error).message}",
                reason="DRAIN_FAILED",
            ) from error
        return fleet_pb2.DrainEngineResponse(result=result)

    async def DrainRevision(
        self, request: fleet_pb2.DrainRevisionRequest, context: Any
    ) -> fleet_pb2.DrainRevisionResponse:
        """Take all engines of a revision out of routing at once, then let each finish its streams.

        Requests that wait here for the revision end with UNAVAILABLE within `patience_s`. The
        gateway then sends them to another revision of their alias.
        """
        _check_grace(request.grace_s)
        members = [
            member
            for member in self._registry.members(request.model)
            if member.info.model_revision == request.model_revision
        ]
        if not members:
            raise errors.NotFoundError(
                f"model_revision: no engine of {request.model[:128]!r} has revision "
                f"{request.model_revision[:128]!r}",
                reason="REVISION_NOT_FOUND",
            )
        for member in members:
            member.order_drain()
        self._changed()
        grace_s = request.grace_s
        return fleet_pb2.DrainRevisionResponse(
            engines=await asyncio.gather(
                *(self._drain_or_report(member, grace_s) for member in members)
            )
        )

    async def _drain_or_report(self, member: Member, grace_s: float) -> fleet_pb2.DrainedEngine:
        name = member.info.engine_id
        try:
            result = await self._drain(member, grace_s)
        except grpc.RpcError as error:
            return fleet_pb2.DrainedEngine(engine_id=name, problem=errors.error_of(error).message)
        return fleet_pb2.DrainedEngine(engine_id=name, result=result)

    async def _drain(self, member: Member, grace_s: float) -> engine_pb2.DrainResponse:
        assert member.link is not None, "the registry makes one for each member"
        stub: Any = engine_pb2_grpc.EngineStub(member.channel)
        response: engine_pb2.DrainResponse = await stub.Drain(
            engine_pb2.DrainRequest(grace_s=grace_s),
            timeout=grace_s + _DRAIN_SLACK_S,
            metadata=await member.link.peer.metadata(),
        )
        return response

    async def Explain(
        self, request: fleet_pb2.ExplainRequest, context: Any
    ) -> fleet_pb2.ExplainResponse:
        """The decisions of one recent request."""
        found = self._decisions.explain(request.request_id)
        if found is None:
            raise errors.NotFoundError(
                f"request_id: {request.request_id[:128]!r} is not among the recent requests",
                reason="REQUEST_NOT_FOUND",
            )
        return found


def _check_grace(grace_s: float) -> None:
    if not 0 <= grace_s <= MAX_GRACE_S:
        raise errors.InvalidArgumentError.for_field(
            "grace_s", f"must be between 0 and {MAX_GRACE_S:g} seconds"
        )
