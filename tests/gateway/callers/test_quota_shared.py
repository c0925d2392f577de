"""Quotas that several gateways count together in a real Redis."""

import asyncio
import contextlib

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from services.common.config.redis_keys import connect
from services.common.errors import AlreadyExistsError, ResourceExhaustedError
from services.gateway.callers.keys_file import Identity, Limits
from services.gateway.callers.quota import shared as shared_module
from services.gateway.callers.quota.quotas import Quotas
from services.gateway.callers.quota.shared import SharedCounts
from services.gateway.config import GatewayConfig

pytestmark = pytest.mark.services
# A machine under load may need longer than a gateway would wait.
LONG_TIMEOUT_S = 10.0


@contextlib.asynccontextmanager
async def gateway(url, name="gw", timeout_s=LONG_TIMEOUT_S):
    client = connect(GatewayConfig(redis=url), timeout_s=timeout_s, name=name)
    shared = SharedCounts(client, gateway=name, prefix="ifq1", timeout_s=timeout_s)
    registry = CollectorRegistry()
    quotas = Quotas(shared, registry)
    quotas.shared, quotas.registry = shared, registry
    await quotas.start()
    try:
        yield quotas
    finally:
        await quotas.stop()


def who(key_id="laptop", key_limits=None, **limits):
    return Identity("acme", key_id, Limits(**limits), key_limits or Limits())


async def outcomes(quotas, identity, ids, tokens=1):
    found = []
    for request_id in ids:
        try:
            await quotas.admit(identity, request_id, tokens)
            found.append("ok")
        except ResourceExhaustedError as error:
            found.append(error.metadata["quota"])
    return found


async def until(condition):
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110 (Redis's state, not ours)
            await asyncio.sleep(0.02)


async def test_two_gateways_share_requests_per_minute(redis_url):
    acme = who(requests_per_min=5)
    async with gateway(redis_url, "a") as a, gateway(redis_url, "b") as b:
        first = await outcomes(a, acme, "123")
        second = await outcomes(b, acme, "456")
        assert first + second == ["ok"] * 5 + ["requests_per_min"]


async def test_two_gateways_share_requests_at_once_and_free_them(redis_url):
    acme = who(concurrency=2)
    async with gateway(redis_url, "a") as a, gateway(redis_url, "b") as b:
        one, two = await a.admit(acme, "1", 1), await b.admit(acme, "2", 1)
        with pytest.raises(ResourceExhaustedError, match="concurrency of tenant acme"):
            await a.admit(acme, "3", 1)
        b.settle(two, 1)
        assert await outcomes(b, acme, "4") == ["ok"]  # at once: its own settlement comes first
        a.settle(one, 1)


async def test_used_tokens_are_charged_for_both_gateways(redis_url):
    acme = who(tokens_per_min=1000)
    async with gateway(redis_url, "a") as a, gateway(redis_url, "b") as b:
        reservation = await a.admit(acme, "1", 600)
        assert await outcomes(b, acme, "2", tokens=600) == ["tokens_per_min"]
        a.settle(reservation, 100)
        await a.stop()
        again = await b.admit(acme, "3", 600)
        left = int(again.headers["x-ratelimit-remaining-tokens"])
        assert 300 <= left < 1000  # it fills while the test runs
        b.settle(again, 5000)
        with pytest.raises(ResourceExhaustedError) as caught:
            await b.admit(acme, "4", 1)
        assert caught.value.retry_after_s > 100
        assert caught.value.metadata["x-ratelimit-remaining-tokens"] == "0"


async def test_a_key_has_limits_of_its_own_within_its_tenants(redis_url):
    tight = who("ci", Limits(requests_per_min=1), requests_per_min=3)
    loose = who("laptop", requests_per_min=3)
    async with gateway(redis_url) as quotas:
        assert await outcomes(quotas, tight, "12") == ["ok", "requests_per_min"]
        assert await outcomes(quotas, loose, "345") == ["ok", "ok", "requests_per_min"]


async def test_an_id_in_flight_at_another_gateway_is_refused(redis_url):
    anyone = Identity("acme")
    async with gateway(redis_url, "a") as a, gateway(redis_url, "b") as b:
        reservation = await a.admit(anyone, "same", 1, unique=True)
        with pytest.raises(AlreadyExistsError, match="same is in flight at another gateway"):
            await b.admit(anyone, "same", 1, unique=True)
        other = await b.admit(Identity("beta"), "same", 1, unique=True)
        a.settle(reservation, 0)
        await a.stop()
        b.settle(await b.admit(anyone, "same", 1, unique=True), 0)
        b.settle(other, 0)


async def test_a_gateway_that_dies_leaks_neither_slots_nor_ids(redis_url, monkeypatch):
    monkeypatch.setattr(shared_module, "LEASE_S", 0.3)
    acme = who(concurrency=1)
    async with gateway(redis_url, "a") as a, gateway(redis_url, "b") as b:
        await a.admit(acme, "1", 1, unique=True)
        a._heartbeats.cancel()  # as if it were dead: its leases are not renewed

        async with asyncio.timeout(30):
            while await outcomes(b, acme, "1") != ["ok"]:  # noqa: ASYNC110 (Redis's clock)
                await asyncio.sleep(0.02)


async def test_a_dead_gateways_slot_is_free_beside_the_slots_of_others(redis_url, monkeypatch):
    monkeypatch.setattr(shared_module, "LEASE_S", 0.3)
    acme = who(concurrency=2)
    async with gateway(redis_url, "a") as a, gateway(redis_url, "b") as b:
        await a.admit(acme, "1", 1)
        await b.admit(acme, "2", 1)
        a._heartbeats.cancel()
        async with asyncio.timeout(10):
            while await outcomes(b, acme, "3") != ["ok"]:
                await b._send_heartbeat(b.shared)  # keeps the set of leases in Redis
                await asyncio.sleep(0.02)


async def test_leases_are_restored_after_redis_was_emptied(start_redis):
    acme = who(concurrency=1)
    server = start_redis()
    async with gateway(server.url, "a") as a, gateway(server.url, "b") as b:
        reservation = await a.admit(acme, "1", 1)
        server.kill()
        await a._send_heartbeat(a.shared)
        await b._send_heartbeat(b.shared)
        assert not a.shared.available
        server.launch()
        await until(lambda: a.shared.available and b.shared.available)
        await a._send_heartbeat(a.shared)
        assert await outcomes(b, acme, "2") == ["concurrency"]
        a.settle(reservation, 1)


async def test_without_redis_no_request_fails_and_each_gateway_has_its_share(
    start_redis, monkeypatch
):
    acme = who(requests_per_min=10)
    warnings = []
    monkeypatch.setattr(shared_module.log, "warning", lambda *logged: warnings.append(logged[0]))
    server = start_redis()
    async with gateway(server.url, "a") as a, gateway(server.url, "b") as b:
        await a._send_heartbeat(a.shared)
        assert a.shared.gateways == b.shared.gateways == 2
        assert await outcomes(a, acme, "12") == ["ok", "ok"]
        server.kill()
        found = await outcomes(a, acme, "3456789")
        assert found == ["ok"] * 4 + ["requests_per_min"] * 3  # half of the 8 that were left
        assert [warning.partition(",")[0] for warning in warnings] == ["Redis is away"]
        sample = a.registry.get_sample_value
        assert sample("inferfleet_gateway_quota_shared") == 0
        assert sample("inferfleet_gateway_quota_local_decisions_total") == 7
        server.launch()
        await until(lambda: a.shared.available)
        assert sample("inferfleet_gateway_quota_shared") == 1


async def test_a_paused_redis_is_waited_for_once(start_redis):
    acme = who(requests_per_min=1000)
    server = start_redis()
    async with gateway(server.url, timeout_s=0.5) as quotas:
        await until(lambda: quotas.shared.available)
        server.pause()
        try:
            loop = asyncio.get_running_loop()
            began = loop.time()
            assert await outcomes(quotas, acme, map(str, range(100))) == ["ok"] * 100
            assert loop.time() - began < 10  # a hundred waits would be fifty seconds
        finally:
            server.resume()
        await until(lambda: quotas.shared.available)


async def test_a_cancelled_admission_holds_nothing(start_redis):
    acme = who(concurrency=1)
    server = start_redis()
    async with gateway(server.url) as quotas:
        server.pause()
        waiting = asyncio.create_task(quotas.admit(acme, "1", 1))
        while not quotas.shared._client.connection_pool._in_use_connections:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        waiting.cancel()
        await asyncio.wait({waiting})
        server.resume()
        assert waiting.cancelled()
        assert await outcomes(quotas, acme, "2") == ["ok"]


@settings(
    max_examples=10,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(steps=st.lists(st.tuples(st.integers(0, 1), st.integers(0, 3), st.booleans()), max_size=25))
def test_requests_at_once_never_exceed_the_limit(redis_url, steps):
    """Requests of either gateway begin and end in any order; a set counts them."""
    acme = who(concurrency=2)

    async def play():
        async with gateway(redis_url, "a") as a, gateway(redis_url, "b") as b:
            held = {}
            for index, number, starts in steps:
                quotas, key = (a, b)[index], (index, number)
                if starts and key not in held:
                    try:
                        held[key] = await quotas.admit(acme, f"{index}-{number}", 1)
                        assert len(held) <= 2
                    except ResourceExhaustedError:
                        assert len(held) == 2
                elif not starts and key in held:
                    quotas.settle(held.pop(key), 1)
                    await asyncio.gather(*quotas._settling.get("acme", ()))
            for (index, _), reservation in held.items():
                (a, b)[index].settle(reservation, 1)

    asyncio.run(play())
