"""An EngineRequest at the balancer's door: its bytes, its parsed form and what routing needs."""

import uuid
from typing import NamedTuple

from inferfleet_proto.internal.v1 import engine_pb2
from services.balancer.engines.engine_view import Asked
from services.common.errors import InvalidArgumentError
from services.common.request_limits import MAX_CHOICES

DEFAULT_OUTPUT_TOKENS = 128


class Incoming(NamedTuple):
    """The bytes are passed on as they are unless a later attempt must say more."""

    raw: bytes
    request: engine_pb2.EngineRequest


def parse(raw: bytes) -> Incoming:
    """Deserialiser of Run.

    Raises:
        google.protobuf.message.DecodeError: not an EngineRequest.
    """
    return Incoming(raw, engine_pb2.EngineRequest.FromString(raw))


def asked_of(request: engine_pb2.EngineRequest) -> Asked:
    """What routing needs.

    Raises:
        InvalidArgumentError: what the gateway must have set is not there.
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
    return Asked(
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
        # The engine refuses an n out of range; nobody here may make room for it.
        num_choices=min(max(sampling.n, 1), MAX_CHOICES),
    )


def for_attempt(
    incoming: Incoming,
    attempt: int,
    continuation: engine_pb2.Continuation | None,
    numerics_id: str,
) -> bytes:
    """The request as a later attempt sends it."""
    again = engine_pb2.EngineRequest()
    again.CopyFrom(incoming.request)
    again.attempt = attempt
    if continuation is not None:
        again.continuation.CopyFrom(continuation)
        again.numerics_id = numerics_id or again.numerics_id
    return again.SerializeToString()
