"""admin.v1.Fleet: what operators see of the fleet and may do to it."""

import time
from collections.abc import Callable
from typing import Any

import grpc

from inferfleet.admin.v1 import fleet_pb2, fleet_pb2_grpc
from inferfleet.internal.v1 import engine_pb2, engine_pb2_grpc
from services.balancer.decision_ledger import DecisionLedger
from services.balancer.registry import EngineRegistry
from services.common import errors

SERVICE_NAME = "inferfleet.admin.v1.Fleet"
# What an engine needs beyond the grace to answer.
_DRAIN_SLACK_S = 5.0
MAX_GRACE_S = 3600.0


class FleetServicer(fleet_pb2_grpc.FleetServicer):
    """Served on the admin port only.

    Args:
        metadata: what shows our membership to engines.
        changed: called when an engine was taken out of routing.
    """

    def __init__(
        self,
        registry: EngineRegistry,
        decisions: DecisionLedger,
        metadata: tuple[tuple[str, str], ...],
        changed: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._registry = registry
        self._decisions = decisions
        self._metadata = metadata
        self._changed = changed
        self._clock = clock

    async def ListEngines(
        self, request: fleet_pb2.ListEnginesRequest, context: Any
    ) -> fleet_pb2.ListEnginesResponse:
        """All engines in the view, whatever their state."""
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
        """Take the engine out of routing at once, then ask it to finish its streams."""
        if not 0 <= request.grace_s <= MAX_GRACE_S:
            raise errors.InvalidArgumentError.for_field(
                "grace_s", f"must be between 0 and {MAX_GRACE_S:g} seconds"
            )
        member = self._registry.member(request.engine_id)
        if member is None:
            raise errors.NotFoundError(
                f"engine_id: no engine {request.engine_id[:128]!r}", reason="ENGINE_NOT_FOUND"
            )
        member.ordered_to_drain = True
        self._changed()
        stub: Any = engine_pb2_grpc.EngineStub(member.channel)
        try:
            result = await stub.Drain(
                engine_pb2.DrainRequest(grace_s=request.grace_s),
                timeout=request.grace_s + _DRAIN_SLACK_S,
                metadata=self._metadata,
            )
        except grpc.RpcError as error:
            # It gets no new work in any case; a second Drain may be tried.
            raise errors.UnavailableError(
                f"engine {request.engine_id} is out of routing but did not drain: "
                f"{errors.error_of(error).message}",
                reason="DRAIN_FAILED",
            ) from error
        return fleet_pb2.DrainEngineResponse(result=result)

    async def Explain(
        self, request: fleet_pb2.ExplainRequest, context: Any
    ) -> fleet_pb2.ExplainResponse:
        """The decisions of one recent request."""
        story = self._decisions.explain(request.request_id)
        if story is None:
            raise errors.NotFoundError(
                f"request_id: {request.request_id[:128]!r} is not among the recent requests",
                reason="REQUEST_NOT_FOUND",
            )
        return story
