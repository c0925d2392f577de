"""A prefix index whose answer tests set themselves, in place of the KV-cache service."""

import asyncio
from typing import Any

from inferfleet_proto.internal.v1 import prefix_index_pb2, prefix_index_pb2_grpc
from tests.doubles.fake_engine import FakeEngine


class FakePrefixIndex(prefix_index_pb2_grpc.PrefixIndexServicer):
    """Answers every Match with `reply`, after `delay_s`."""

    def __init__(self) -> None:
        self.reply = prefix_index_pb2.MatchResponse(known=True)
        self.delay_s = 0.0
        self.requests: list[prefix_index_pb2.MatchRequest] = []
        self.address = ""

    def holds(self, engine: FakeEngine, blocks: int) -> None:
        """Add to the reply that the engine holds the first `blocks` blocks."""
        self.reply.engines.add(
            engine_id=engine.info.engine_id, epoch_ms=engine.info.epoch_ms, matched_blocks=blocks
        )

    async def Match(self, request: prefix_index_pb2.MatchRequest, context: Any) -> Any:
        self.requests.append(request)
        await asyncio.sleep(self.delay_s)
        return self.reply
