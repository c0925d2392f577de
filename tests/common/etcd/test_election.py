"""One leader at a time, and a deposed one that cannot write."""

import asyncio
import contextlib

import pytest

from services.common.etcd.client import Etcd, Put
from services.common.etcd.election import Election

pytestmark = pytest.mark.services


@pytest.fixture
async def etcd(etcd_endpoint):
    client = Etcd([etcd_endpoint])
    yield client
    await client.close()


async def test_one_of_three_leads_and_a_resignation_makes_room(etcd, etcd_prefix):
    elections = [Election(etcd, f"{etcd_prefix}leader", bytes([i]), ttl_s=2) for i in range(3)]
    for election in elections:
        await election.start()
    led: list[int] = []
    for _ in range(3):
        waits = {
            asyncio.ensure_future(election.wait_elected()): election
            for election in elections
            if election not in led
        }
        async with asyncio.timeout(15):
            done, rest = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        assert len(done) == 1
        assert sum(election.leadership is not None for election in elections) == 1
        (leader,) = (waits[task] for task in done)
        led.append(leader)
        for task in rest:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        await leader.stop()
        assert leader.leadership is None


async def test_a_deposed_leader_cannot_write(etcd, etcd_prefix):
    key, map_key = f"{etcd_prefix}leader", f"{etcd_prefix}map"
    first, second = (Election(etcd, key, name, ttl_s=2) for name in (b"1", b"2"))
    await first.start()
    term = await asyncio.wait_for(first.wait_elected(), 10)
    assert await etcd.transaction([term.fence], [Put(map_key, b"first")])
    await etcd.delete(key)  # an operator deposes it; it does not know yet
    await second.start()
    newer = await asyncio.wait_for(second.wait_elected(), 10)
    assert newer.create_revision > term.create_revision
    assert await etcd.transaction([term.fence], [Put(map_key, b"late")]) is None
    assert await etcd.transaction([newer.fence], [Put(map_key, b"second")])
    assert (await etcd.get(map_key)).value == b"second"
    await first.stop()
    assert second.leadership == newer
    await second.stop()


async def test_a_leader_without_etcd_ends_its_term_before_the_lease_can(start_etcd):
    server = start_etcd()
    etcd = Etcd([server.address], timeout_s=0.5)
    election = Election(etcd, "/leader", b"", ttl_s=2)
    await election.start()
    term = await asyncio.wait_for(election.wait_elected(), 10)
    server.pause()
    async with asyncio.timeout(2.1):
        while election.leadership is not None:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    server.resume()
    again = await asyncio.wait_for(election.wait_elected(), 20)
    assert again.create_revision >= term.create_revision
    await election.stop()
    assert await etcd.get("/leader") is None
    await etcd.close()
