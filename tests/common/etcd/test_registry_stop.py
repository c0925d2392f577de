"""A registration whose value changes just before it is stopped must still end."""

import asyncio

from services.common.etcd.registry import Registration


class PatientEtcd:
    """Answers everything; the race is between a change and a cancellation, not in the store."""

    async def grant_lease(self, ttl_s: int) -> int:
        return 1

    async def put(self, key: str, value: bytes, *, lease: int) -> int:
        return 1

    async def keep_alive(self, lease: int) -> int:
        return 5

    async def get(self, key: str) -> None:
        return None

    async def revoke_lease(self, lease: int) -> None:
        return None


async def test_stop_right_after_refresh_ends():
    for turns in range(4):
        registration = Registration(PatientEtcd(), "key", lambda: b"value")
        await registration.start()
        await registration.wait_registered()
        await registration.refresh()
        for _ in range(turns):
            await asyncio.sleep(0)
        async with asyncio.timeout(5):
            await registration.stop()
