"""An EngineRequest as the balancer receives it: its bytes, its parsed form, and the part that
routing needs."""

import uuid
from typing import NamedTuple

from inferfleet_proto.internal.v1 import engine_pb2
from services.balancer.engines.engine_view import RoutingRequest
from services.common.errors import InvalidArgumentError
from services.common.request_limits import MAX_CHOICES

DEFAULT_OUTPUT_TOKENS = 128


class Incoming(NamedTuple):
    """The first attempt forwards the bytes unchanged; later attempts send a changed copy."""

    raw: bytes
    request: engine_pb2.EngineRequest


def parse(raw: bytes) -> Incoming:
    """Deserialiser of Run.

    Raises:
        google.protobuf.message.DecodeError: `raw` is not an EngineRequest.
    """
    return Incoming(raw, engine_pb2.EngineRequest.FromString(raw))


def routing_request(request: engine_pb2.EngineRequest) -> RoutingRequest:
    """Extract the part of a request that routing and admission need.

    Raises:
        InvalidArgumentError: a field that the gateway must set is empty.
    """
    inner = request.request
    if not inner.model:
        raise InvalidArgumentError.for_field("request.model", "must not be empty")
    if inner.WhichOneof("prompt") != "token_ids" or not inner.token_ids.ids:
        raise InvalidArgumentError.for_field(
            "request.token_ids", "must hold at least one token between services"
        )
    sampling, routing = inner.sampling, inner.routing
    limit = inner.stop.max_tokens if inner.stop.HasField("max_tokens") else None
    expected = DEFAULT_OUTPUT_TOKENS
    if routing.HasField("expected_output_tokens"):
        expected = routing.expected_output_tokens
    return RoutingRequest(
        request_id=inner.request_id or str(uuid.uuid4()),
        model=inner.model,
        token_ids=inner.token_ids.ids,
        tenant=request.tenant,
        salt=request.salt,
        priority=routing.priority,
        session_id=routing.session_id,
        expected_output=max(expected if limit is None else min(expected, limit), 1),
        numerics_id=request.numerics_id,
        revision=request.model_revision,
        use_cache=not inner.cache.bypass,
        greedy=sampling.HasField("temperature") and sampling.temperature == 0,
        # The engine rejects an n out of range; until then it must not reserve more slots.
        num_choices=min(max(sampling.n, 1), MAX_CHOICES),
    )


def attempt_bytes(
    incoming: Incoming,
    attempt: int,
    continuation: engine_pb2.Continuation | None,
    numerics_id: str,
) -> bytes:
    """The serialised request of a later attempt.

    Args:
        attempt: number of the attempt.
        continuation: the output that the client already has; None if it has none.
        numerics_id: numerics that a resumed stream requires; empty for any.
    """
    again = engine_pb2.EngineRequest()
    again.CopyFrom(incoming.request)
    again.attempt = attempt
    if continuation is not None:
        again.continuation.CopyFrom(continuation)
        again.numerics_id = numerics_id or again.numerics_id
    return again.SerializeToString()
