"""A key that comes back for ever, and a view that survives everything that etcd may do."""

import asyncio
import time

import pytest

from services.common.etcd.client import Etcd
from services.common.etcd.registry import Registration, RegistryView

pytestmark = pytest.mark.services


@pytest.fixture
async def etcd(etcd_endpoint):
    client = Etcd([etcd_endpoint])
    yield client
    await client.close()


async def seen(view: RegistryView, wanted, within_s: float = 20.0) -> None:
    """Return when the view is as wanted."""
    async with asyncio.timeout(within_s):
        version = view.version
        while not wanted(view):
            version = await view.wait_change(version)


async def standing(etcd: Etcd, key: str, wanted, within_s: float = 20.0):
    """The key when it is as wanted (None: not there)."""
    async with asyncio.timeout(within_s):
        while not wanted(found := await etcd.get(key)):  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        return found


async def test_a_view_follows_a_registration_through_its_life(etcd, etcd_prefix):
    view, value = RegistryView(etcd, etcd_prefix), [b"1"]
    await view.start()
    await view.wait_listed()
    assert dict(view.snapshot()) == {}
    registration = Registration(etcd, f"{etcd_prefix}me", lambda: value[0])
    await registration.start()
    await seen(view, lambda v: v.snapshot() == {f"{etcd_prefix}me": b"1"})
    await registration.wait_registered()
    assert registration.registered
    before = view.snapshot()
    value[0] = b"2"
    await registration.refresh()
    await seen(view, lambda v: v.snapshot() == {f"{etcd_prefix}me": b"2"})
    assert before == {f"{etcd_prefix}me": b"1"}, "a snapshot does not change under its reader"
    with pytest.raises(TypeError):
        view.snapshot()["x"] = b""
    await registration.stop()
    await registration.stop()
    await seen(view, lambda v: v.snapshot() == {})
    await view.stop()
    await view.stop()


async def test_a_key_that_somebody_deletes_comes_back(etcd, etcd_prefix):
    key = f"{etcd_prefix}me"
    registration = Registration(etcd, key, lambda: b"1", ttl_s=2)
    await registration.start()
    await registration.wait_registered()
    await etcd.delete(key)
    await standing(etcd, key, lambda found: found is not None)
    await registration.stop()


async def test_a_revoked_lease_is_granted_again(etcd, etcd_prefix):
    key = f"{etcd_prefix}me"
    registration = Registration(etcd, key, lambda: b"1", ttl_s=2)
    await registration.start()
    await registration.wait_registered()
    first = await etcd.get(key)
    await etcd.revoke_lease(first.lease)
    again = await standing(etcd, key, lambda found: found is not None)
    assert again.lease != first.lease
    await registration.stop()
    assert await etcd.get(key) is None


async def test_a_successor_of_the_same_name_keeps_the_key(etcd, etcd_prefix):
    key = f"{etcd_prefix}me"
    old = Registration(etcd, key, lambda: b"old", ttl_s=2)
    await old.start()
    await old.wait_registered()
    new = Registration(etcd, key, lambda: b"new", ttl_s=2)
    await new.start()
    await new.wait_registered()
    async with asyncio.timeout(10):
        while old.registered:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    assert (await etcd.get(key)).value == b"new"
    await old.stop()
    assert (await etcd.get(key)).value == b"new", "stopping deletes only what is one's own"
    await new.stop()
    assert await etcd.get(key) is None


async def test_a_killed_process_leaves_with_its_lease(etcd, etcd_prefix):
    key = f"{etcd_prefix}me"
    registration = Registration(etcd, key, lambda: b"1", ttl_s=1)
    await registration.start()
    await registration.wait_registered()
    registration._task.cancel()  # as SIGKILL would: nothing is renewed and nothing deleted
    await standing(etcd, key, lambda found: found is None)


async def test_without_etcd_nothing_fails_and_stopping_is_quick(start_etcd):
    server = start_etcd()
    server.stop()
    etcd = Etcd([server.address], timeout_s=0.5)
    view, registration = RegistryView(etcd, "/p/"), Registration(etcd, "/p/me", lambda: b"1")
    await view.start()
    await registration.start()
    server.launch()
    await seen(view, lambda v: v.snapshot() == {"/p/me": b"1"})
    server.pause()
    began = time.monotonic()
    await registration.stop()
    await view.stop()
    await etcd.close()
    assert time.monotonic() - began < 4


async def test_etcd_comes_back_empty(start_etcd):
    server = start_etcd()
    etcd = Etcd([server.address], timeout_s=0.5)
    await etcd.put("/p/ghost", b"")
    view, registration = RegistryView(etcd, "/p/"), Registration(etcd, "/p/me", lambda: b"1")
    await view.start()
    await registration.start()
    await seen(view, lambda v: len(v.snapshot()) == 2)
    server.kill()
    await seen(view, lambda v: not v.connected)
    assert set(view.snapshot()) == {"/p/ghost", "/p/me"}, "kept while etcd is away"
    server.erase()
    server.launch()
    await seen(view, lambda v: v.connected and set(v.snapshot()) == {"/p/me"})
    await registration.stop()
    await view.stop()
    await etcd.close()


async def _pause(start_etcd, pause_s: float, ttl_s: int) -> float:
    """Seconds from the end of a pause of etcd until the key stands for good."""
    server = start_etcd()
    etcd = Etcd([server.address], timeout_s=0.5)
    view = RegistryView(etcd, "/p/")
    registration = Registration(etcd, "/p/me", lambda: b"1", ttl_s=ttl_s)
    await view.start()
    await registration.start()
    await seen(view, lambda v: "/p/me" in v.snapshot())
    server.pause()
    ends = time.monotonic() + pause_s
    while time.monotonic() < ends:
        assert "/p/me" in view.snapshot(), "the last known map is kept"
        await asyncio.sleep(0.05)
    server.resume()
    began = time.monotonic()
    await seen(view, lambda v: v.connected)
    # A paused etcd ends leases as soon as it goes on; the key must be back for good soon after.
    stable_since = None
    while stable_since is None or time.monotonic() - stable_since < ttl_s + 1:
        await asyncio.sleep(0.05)
        there = "/p/me" in view.snapshot() and await etcd.get("/p/me") is not None
        stable_since = (stable_since or time.monotonic()) if there else None
        assert time.monotonic() - began < 3 * ttl_s + 20
    came_back_after = stable_since - began
    await registration.stop()
    await view.stop()
    await etcd.close()
    return came_back_after


async def test_a_pause_shorter_than_the_lease(start_etcd):
    assert await _pause(start_etcd, pause_s=1.0, ttl_s=3) < 5


async def test_a_pause_longer_than_the_lease(start_etcd):
    assert await _pause(start_etcd, pause_s=3.0, ttl_s=1) < 6


@pytest.mark.verify
@pytest.mark.timeout(180)
@pytest.mark.parametrize("pause_s", [3.0, 10.0, 20.0])
async def test_pauses_beside_a_lease_of_five_seconds(start_etcd, pause_s):
    assert await _pause(start_etcd, pause_s=pause_s, ttl_s=5) < 10


@pytest.mark.verify
@pytest.mark.timeout(180)
@pytest.mark.parametrize("with_data", [True, False])
async def test_a_minute_without_etcd(start_etcd, with_data):
    server = start_etcd()
    etcd = Etcd([server.address])
    view, registration = RegistryView(etcd, "/p/"), Registration(etcd, "/p/me", lambda: b"1")
    await view.start()
    await registration.start()
    await seen(view, lambda v: "/p/me" in v.snapshot())
    server.stop()
    if not with_data:
        server.erase()
    await asyncio.sleep(60)
    assert "/p/me" in view.snapshot()
    server.launch()
    await seen(view, lambda v: v.connected and "/p/me" in v.snapshot(), within_s=10)
    await standing(etcd, "/p/me", lambda found: found is not None)
    await registration.stop()
    await view.stop()
    await etcd.close()


async def test_a_value_that_changes_all_the_time_keeps_its_lease(etcd, etcd_prefix):
    """Writing a key does not renew the lease it hangs on."""
    key = f"{etcd_prefix}busy"
    registration = Registration(etcd, key, lambda: b"", ttl_s=2)
    await registration.start()
    await registration.wait_registered()
    lease = (await etcd.get(key)).lease
    ends = time.monotonic() + 4.5  # more than twice its time to live
    while time.monotonic() < ends:
        registration.refresh_soon()
        await asyncio.sleep(0.05)
        assert (found := await etcd.get(key)) is not None
        assert found.lease == lease
    await registration.stop()
