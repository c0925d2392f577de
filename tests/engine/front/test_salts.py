"""The salt on its whole way through front and core: tenants never share cached blocks."""

import pytest

from inferfleet_proto.internal.v1 import engine_pb2
from inferfleet_proto.v1 import inference_pb2
from services.common.block_hash import effective_salt
from services.engine.contract.core_link import CoreLink

PROMPT = [65 + index % 26 for index in range(40)]


@pytest.fixture
async def cached_tokens(start_front):
    """Runs a request to its end at one engine with a simulated model; returns its cache hit."""
    front = await start_front(core=CoreLink(), simulate="yes", block_size=4, num_blocks=64)

    async def run(request_id: str, tenant: str) -> int:
        request = engine_pb2.EngineRequest(
            request=inference_pb2.GenerateRequest(
                model="fake",
                token_ids=inference_pb2.TokenIds(ids=PROMPT),
                request_id=request_id,
                stop=inference_pb2.StopParams(max_tokens=2, ignore_eos=True),
            ),
            tenant=tenant,
            salt=effective_salt(tenant),
        )
        events = [event async for event in front.engine.Run(request)]
        return events[0].started.cached_tokens

    return run


async def test_one_tenants_prompt_is_no_hit_for_another(cached_tokens):
    assert await cached_tokens("a1", "acme") == 0
    assert await cached_tokens("b1", "globex") == 0
    assert await cached_tokens("n1", "") == 0
    for request_id, tenant in (("a2", "acme"), ("b2", "globex"), ("n2", "")):
        assert await cached_tokens(request_id, tenant) == 39, "each has its own"
