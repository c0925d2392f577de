"""Registry records that tests set themselves, in place of etcd."""

import asyncio

from google.protobuf import json_format

from services.common.etcd.registry import ENGINES_PREFIX
from tests.doubles.fake_engine import FakeEngine


class FakeRegistry:
    """Implements `RegistryRecords`."""

    def __init__(self) -> None:
        self.items: dict[str, bytes] = {}
        self.connected = True
        self._version = 0
        self._changed = asyncio.Condition()

    def snapshot(self) -> dict[str, bytes]:
        return dict(self.items)

    async def wait_change(self, version: int) -> int:
        async with self._changed:
            await self._changed.wait_for(lambda: self._version != version)
            return self._version

    async def set(self, key: str, value: bytes | None) -> None:
        """Set a record; None deletes it."""
        if value is None:
            self.items.pop(key, None)
        else:
            self.items[key] = value
        async with self._changed:
            self._version += 1
            self._changed.notify_all()

    async def register(self, engine: FakeEngine) -> None:
        """Set the record of an engine."""
        value = json_format.MessageToJson(engine.info).encode()
        await self.set(ENGINES_PREFIX + engine.info.engine_id, value)

    async def forget(self, engine: FakeEngine) -> None:
        """Delete the record of an engine."""
        await self.set(ENGINES_PREFIX + engine.info.engine_id, None)
