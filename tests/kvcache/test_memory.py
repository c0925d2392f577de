"""Redis evicts by itself when it is full; and what one tenant holds, another cannot tell."""

import redis

from services.common import block_hash
from services.kvcache.index import Status
from services.kvcache.metrics import KvCacheMetrics
from services.kvcache.sweeper import Sweeper

BLOCKS = 16


async def test_a_full_redis_evicts_blocks_and_never_an_engines_epoch(
    open_index, start_redis, blocks, matched
):
    server = start_redis()
    index = await open_index(server.url, max_entries=10_000_000)
    with redis.Redis.from_url(server.url) as client:
        client.config_set("maxmemory", client.info("memory")["used_memory"] + 1_000_000)
        chains = [range(start, start + 500) for start in range(0, 20_000, 500)]
        for sequence, chain in enumerate(chains, 1):
            applied = await index.apply(blocks.batch(sequence, blocks.stored(*chain)))
            assert applied.status is Status.APPLIED, "a full Redis takes writes all the same"
        assert client.info("stats")["evicted_keys"] > 5_000
        assert client.exists("if1:owners", "if1:live", "if1:meta") == 3
        # What is left is a prefix by what is there, and never more than was stored.
        for chain in chains:
            keys = [index.entry_prefix.encode() + blocks(name) for name in chain]
            # One command: while the loop is blocked, no probe of Redis is served.
            present = [int(value is not None) for value in client.mget(keys)]
            first_gap = present.index(0) if 0 in present else len(present)
            expected = {"e": first_gap} if first_gap else {}
            assert await matched(index, blocks(*chain)) == expected
        client.config_set("maxmemory", 0)  # nothing is evicted while it is counted
        left = sum(1 for _ in client.scan_iter(index.entry_prefix.encode() + b"*", 1000))
    sweeper = Sweeper(index, KvCacheMetrics(), interval_s=60)
    await sweeper.sweep()
    assert await index.num_entries() == left, "the count follows what Redis evicted"
    assert (await index.owners())["e"].sequence == len(chains)


def prompt(tenant: str) -> bytes:
    """The same text's blocks as a tenant's own requests name them."""
    namespace = block_hash.namespace(
        model_revision="m", kv_layout="l", numerics_id="n", block_size=16
    )
    root = block_hash.root(namespace, block_hash.effective_salt(tenant))
    return block_hash.join_for_index(block_hash.hash_blocks(root, range(BLOCKS * 16), 16))


async def test_what_another_tenant_holds_changes_neither_answer_nor_work(
    index, blocks, matched, redis_url
):
    """Time is what a tenant could measure; the work done is what can be asserted exactly."""
    await index.apply(blocks.batch(1, blocks.stored(7)))
    with redis.Redis.from_url(redis_url) as client:

        async def match_with_counts() -> tuple[dict[str, int], dict[str, int]]:
            client.config_resetstat()
            found = await matched(index, prompt("b"))
            stats = client.info("commandstats")
            calls = {name: stats[name]["calls"] for name in stats if "config" not in name}
            hits = client.info("stats")
            return found, {**calls, "hits": hits["keyspace_hits"], "miss": hits["keyspace_misses"]}

        await match_with_counts()  # loads the script
        cold = await match_with_counts()
        await index.apply(blocks.batch(2, blocks.stored(), blocks.stored(8)))
        stored = blocks.stored(9)._replace(hashes=prompt("a"))
        await index.apply(blocks.batch(3, stored))
        assert await matched(index, prompt("a")) == {"e": BLOCKS}
        assert await match_with_counts() == cold
        assert cold[0] == {}
        await index.apply(blocks.batch(4, stored._replace(hashes=prompt("b"))))
        assert (await match_with_counts())[0] == {"e": BLOCKS}, "its own are found"
