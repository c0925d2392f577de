"""Client of the prefix index: how much of a prompt each engine has in its cache.

There is one Match call per hash namespace among the candidates (usually one), with a short
deadline. If the index does not answer, routing continues without it. A breaker makes an unavailable
index cost nothing after its first few deadlines.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
from opentelemetry import trace
from opentelemetry.context import Context

from inferfleet_proto.internal.v1 import prefix_index_pb2, prefix_index_pb2_grpc
from services.balancer.engines.breaker import Breaker
from services.balancer.engines.engine_view import EngineLife, EngineView, RoutingRequest
from services.balancer.routing.prefix_holds import PrefixHolds
from services.common import block_hash
from services.common.rpc import REQUEST_ID_KEY, Membership, Peer
from services.common.service import telemetry

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Matches:
    """The matches of one prompt."""

    known: bool
    """Whether the index answered. Unknown differs from an answer without matches."""
    tokens: Mapping[EngineLife, int] = field(default_factory=dict)
    """Prompt tokens in the index, by engine life."""
    chains: Mapping[tuple[bytes, int], bytes] = field(default_factory=dict)
    """Joined index hashes of the prompt's blocks, by hash namespace and block size."""
    holds: PrefixHolds | None = None
    """Prefixes of the requests in flight, which the index may not have yet."""

    def matched_tokens(self, engine: EngineView) -> int:
        """Prompt tokens that this life of the engine can reuse, or will have computed.

        For an engine that needs state, those up to a snapshot in the index: what a request in
        flight computes becomes usable only where the engine takes a snapshot of it.
        """
        indexed = self.tokens.get(engine.life, 0)
        chain = self.chain_for(engine)
        if self.holds is None or not chain or engine.needs_state:
            return indexed
        return max(indexed, self.holds.matched(engine.life, chain) * engine.block_size)

    def chain_for(self, engine: EngineView) -> bytes:
        """Joined hashes of the prompt's blocks in this engine's namespace; empty if none is
        reusable."""
        return self.chains.get((engine.hash_namespace, engine.block_size), b"")


UNKNOWN = Matches(known=False)


class PrefixMatcher:
    """The client of PrefixIndex.Match.

    Args:
        address: host:port of kvcache. If it is empty, every match is unknown.
        timeout_s: deadline of one Match call.
        observe: gets the outcome ("known", "unknown", "failed", "skipped") and the seconds of each
            match.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        address: str,
        membership: Membership,
        *,
        timeout_s: float,
        tracer: trace.Tracer,
        observe: Callable[[str, float], None] = lambda outcome, seconds: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._channel = membership.channel(address) if address else None
        self._peer: Peer | None = None
        if self._channel is not None:
            self._peer = membership.peer(self._channel, address, registered=False)
        self._timeout_s = timeout_s
        self._tracer = tracer
        self._observe = observe
        self._clock = clock
        self.holds = PrefixHolds()
        self.breaker = Breaker()

    async def close(self) -> None:
        """Close the channel; idempotent."""
        if self._channel is not None:
            await self._channel.close(None)

    async def match(
        self, request: RoutingRequest, engines: Sequence[EngineView], parent: Context
    ) -> Matches:
        """Look up how much of the prompt each engine holds. An unavailable index is no error.

        Args:
            parent: trace context of the request.
        """
        kinds = {(engine.hash_namespace, engine.block_size) for engine in engines}
        stateful = {
            (engine.hash_namespace, engine.block_size) for engine in engines if engine.needs_state
        }
        chains = {}
        if request.use_cache:
            chains = {kind: chain for kind in kinds if (chain := _hash_chain(request, *kind))}
        if self._channel is None or not chains:
            self._observe("skipped", 0.0)
            # With no blocks to look up the answer is known: nothing can be reused.
            return Matches(self._channel is not None, {}, chains, self.holds)
        began = self._clock()
        if not self.breaker.admits(began):
            self._observe("skipped", 0.0)
            return Matches(False, {}, chains, self.holds)
        self.breaker.began(began)
        answers = await asyncio.gather(
            *(
                self._call_index(request, kind[1], chain, kind in stateful, parent)
                for kind, chain in chains.items()
            )
        )
        tokens = {key: n for answer in answers for key, n in answer.tokens.items()}
        known = all(answer.known for answer in answers)
        return Matches(known, tokens, chains, self.holds)

    async def _call_index(
        self,
        request: RoutingRequest,
        block_size: int,
        chain: bytes,
        needs_state: bool,
        parent: Context,
    ) -> Matches:
        assert self._channel is not None
        assert self._peer is not None
        stub: Any = prefix_index_pb2_grpc.PrefixIndexStub(self._channel)
        lookup = prefix_index_pb2.MatchRequest(block_hashes=chain, needs_state=needs_state)
        began = self._clock()
        attributes = {"inferfleet.request_id": request.request_id}
        with self._tracer.start_as_current_span(
            "match", context=parent, kind=trace.SpanKind.CLIENT, attributes=attributes
        ) as span:
            metadata = (
                (REQUEST_ID_KEY, request.request_id),
                *telemetry.inject(trace.set_span_in_context(span)),
            )
            try:
                shown = self._peer.shown
                if shown is None:
                    shown = await self._peer.metadata(self._timeout_s)
                reply = await stub.Match(
                    lookup, timeout=self._timeout_s, metadata=(*shown, *metadata)
                )
            except grpc.RpcError as error:
                self._peer.forget()
                self.breaker.failed(self._clock())
                self._observe("failed", self._clock() - began)
                span.set_attribute("inferfleet.match.outcome", error.code().name)
                return UNKNOWN
            except BaseException:
                self.breaker.undecided()
                raise
            self.breaker.succeeded()
            outcome = "known" if reply.known else "unknown"
            span.set_attribute("inferfleet.match.outcome", outcome)
            self._observe(outcome, self._clock() - began)
            limit = len(chain) // block_hash.INDEX_HASH_BYTES
            found = {
                (m.engine_id, m.epoch_ms): min(m.matched_blocks, limit) * block_size
                for m in reply.engines
            }
            return Matches(bool(reply.known), found)


def _hash_chain(request: RoutingRequest, namespace: bytes, block_size: int) -> bytes:
    """Joined hashes of the prompt's full blocks. The last token is left out: it is always computed,
    because its logits are needed."""
    limit = (len(request.token_ids) - 1) // block_size
    root = block_hash.root(namespace, request.salt)
    return block_hash.join_for_index(
        block_hash.hash_blocks(root, request.token_ids, block_size, limit)
    )
