"""The PrefixIndex service over gRPC: messages in and out, spans, answers while Redis is away."""

import time
from collections.abc import AsyncIterator
from typing import Any

import grpc
from opentelemetry import trace

from inferfleet_proto.internal.v1 import prefix_index_pb2 as pb
from inferfleet_proto.internal.v1 import prefix_index_pb2_grpc
from services.common import rpc
from services.common.block_hash import INDEX_HASH_BYTES
from services.common.errors import InvalidArgumentError, UnavailableError
from services.common.service import telemetry
from services.kvcache.events import MAX_PROMPT_BLOCKS, check_engine, check_hashes
from services.kvcache.index import PrefixIndex
from services.kvcache.metrics import KvCacheMetrics, value_of
from services.kvcache.publishers import Answer, Publishers
from services.kvcache.redis_connection import RedisUnavailableError
from services.kvcache.sweeper import Sweeper

SERVICE_NAME = "inferfleet.internal.v1.PrefixIndex"
_RETURN_S = 0.002
"""Part of the caller's deadline that is left for the way back."""
Context = grpc.aio.ServicerContext[Any, Any]


class PrefixIndexServicer(prefix_index_pb2_grpc.PrefixIndexServicer):
    """Serves the index. A Match never fails because of Redis.

    Args:
        match_timeout_s: longest wait for Redis in a Match.
    """

    def __init__(
        self,
        *,
        index: PrefixIndex,
        publishers: Publishers,
        sweeper: Sweeper,
        metrics: KvCacheMetrics,
        tracer: trace.Tracer,
        match_timeout_s: float,
    ) -> None:
        self._index = index
        self._publishers = publishers
        self._sweeper = sweeper
        self._metrics = metrics
        self._tracer = tracer
        self._match_timeout_s = match_timeout_s

    async def Publish(
        self, request_iterator: AsyncIterator[pb.PublishRequest], context: Context
    ) -> None:
        """Acknowledge an engine's batches as they are written to the index."""

        async def send(answer: Answer) -> None:
            await context.write(
                pb.PublishResponse(
                    acked_sequence=answer.acked,
                    need_snapshot=answer.need_snapshot,
                    stale_epoch=answer.stale,
                )
            )

        with self._publishers.open_session() as session:
            await session.run(request_iterator, send)

    async def Match(self, request: pb.MatchRequest, context: Context) -> pb.MatchResponse:
        """The longest prefix per engine, or known=false before the caller's deadline."""
        metadata = context.invocation_metadata()
        hashes = check_hashes(request.block_hashes, "block_hashes")
        blocks = len(hashes) // INDEX_HASH_BYTES
        if blocks > MAX_PROMPT_BLOCKS:
            message = f"{blocks} blocks are more than {MAX_PROMPT_BLOCKS}"
            raise InvalidArgumentError.for_field("block_hashes", message)
        attributes: dict[str, str | int] = {"inferfleet.match.blocks": blocks}
        for key, value in metadata or ():
            if key == rpc.REQUEST_ID_KEY:
                attributes["inferfleet.request_id"] = str(value)
        with self._tracer.start_as_current_span(
            "match",
            context=telemetry.extract(metadata),
            kind=trace.SpanKind.SERVER,
            attributes=attributes,
        ) as span:
            reply = await self._match(hashes, request.needs_state, rpc.remaining_s(context))
            span.set_attribute("inferfleet.match.known", reply.known)
            longest = max((m.matched_blocks for m in reply.engines), default=0)
            span.set_attribute("inferfleet.match.longest", longest)
            span.set_attribute("inferfleet.match.engines", len(reply.engines))
        return reply

    async def Forget(self, request: pb.ForgetRequest, context: Context) -> pb.ForgetResponse:
        """Drop an engine's blocks with one write; a sweep removes the entries later."""
        check_engine(request.engine_id, request.epoch_ms)
        try:
            if await self._index.forget(request.engine_id, request.epoch_ms):
                self._sweeper.request()
        except RedisUnavailableError as error:
            raise UnavailableError(
                f"the engine's blocks could not be dropped: {error}",
                reason="STORE_AWAY",
                retry_after_s=1.0,
            ) from error
        return pb.ForgetResponse()

    async def Stats(self, request: pb.StatsRequest, context: Context) -> pb.StatsResponse:
        """Counters of this process and, if Redis answers, the size of the index."""
        metrics = self._metrics
        reply = pb.StatsResponse(
            gaps=value_of(metrics.gaps),
            resyncs=value_of(metrics.resyncs),
            stale_writes_refused=value_of(metrics.stale),
            events_applied=value_of(metrics.events),
        )
        try:
            owners = await self._index.owners()
            reply.entries = await self._index.num_entries()
        except RedisUnavailableError:
            return reply
        for owner in owners.values():
            reply.owners.add(
                engine_id=owner.engine_id, epoch_ms=owner.epoch_ms, last_sequence=owner.sequence
            )
        reply.store_available = True
        return reply

    async def _match(
        self, hashes: bytes, needs_state: bool, deadline_s: float | None
    ) -> pb.MatchResponse:
        if not hashes:
            return pb.MatchResponse(known=self._index.available)
        timeout_s = self._match_timeout_s
        if deadline_s is not None:
            timeout_s = max(min(timeout_s, deadline_s - _RETURN_S), 0.001)
        began = time.monotonic()
        try:
            matches = await self._index.match(hashes, needs_state, timeout_s)
        except RedisUnavailableError:
            self._metrics.unknown.inc()
            return pb.MatchResponse(known=False)
        self._metrics.match_seconds.observe(time.monotonic() - began)
        reply = pb.MatchResponse(known=True)
        for match in matches:
            reply.engines.add(
                engine_id=match.engine_id, epoch_ms=match.epoch_ms, matched_blocks=match.blocks
            )
        return reply
