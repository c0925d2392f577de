"""A prefix index on a real Redis, and records in short notation."""

import asyncio
import hashlib
import json
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from inferfleet_cli.supervisor.dev_backends import tied_to_parent
from inferfleet_proto.internal.v1 import prefix_index_pb2 as pb
from inferfleet_proto.internal.v1 import prefix_index_pb2_grpc
from services.kvcache.events import HISTORY, Batch, Operation
from services.kvcache.index import PrefixIndex
from services.kvcache.redis_settings import RedisSettings


class Blocks:
    """Stable digests by name: `blocks(1, 2)` is the joined hashes of blocks 1 and 2."""

    def __call__(self, *names: int) -> bytes:
        return b"".join(hashlib.sha256(str(name).encode()).digest()[:16] for name in names)

    def stored(self, *names: int, kind: int = HISTORY) -> Operation:
        return Operation("S", kind, self(*names))

    def removed(self, *names: int, kind: int = HISTORY) -> Operation:
        return Operation("R", kind, self(*names))

    cleared = Operation("C", 0, b"")

    def batch(
        self, sequence: int, *operations: Operation, engine: str = "e", epoch: int = 1, **more: Any
    ) -> Batch:
        return Batch(engine, epoch, sequence, tuple(operations), **more)


@pytest.fixture
def blocks() -> Blocks:
    return Blocks()


@pytest.fixture
async def open_index() -> AsyncIterator[Callable[..., Any]]:
    """Opens indexes that are closed after the test."""
    indexes: list[PrefixIndex] = []

    async def opened(
        url: str, *, entry_ttl_s: int = 3600, max_entries: int = 100_000, **settings: Any
    ) -> PrefixIndex:
        index = PrefixIndex(
            RedisSettings(url, **settings), entry_ttl_s=entry_ttl_s, max_entries=max_entries
        )
        indexes.append(index)
        await index.start()
        return index

    yield opened
    for index in indexes:
        await index.close()


@pytest.fixture
async def index(open_index: Callable[[str], Any], redis_url: str) -> PrefixIndex:
    """On the session's Redis, emptied."""
    opened: PrefixIndex = await open_index(redis_url)
    return opened


@pytest.fixture
def matched() -> Callable[..., Any]:
    """Engine → matched blocks."""

    async def ask(index: PrefixIndex, hashes: bytes, needs_state: bool = False) -> dict[str, int]:
        found: Iterable[Any] = await index.match(hashes, needs_state, 1.0)
        return {match.engine_id: match.blocks for match in found}

    return ask


class KvCacheProcess:
    """The real service, as a child process."""

    def __init__(self, directory: Path, url: str, **settings: Any) -> None:
        self.ready_file = directory / "ready.json"
        self.log_path = directory / "log"
        flags = {"redis": url, "ready_file": self.ready_file, **settings}
        argv = [sys.executable, "-m", "services.kvcache"]
        for key, value in flags.items():
            argv += [f"--{key.replace('_', '-')}", str(value)]
        with self.log_path.open("wb") as log:
            self.process = subprocess.Popen(tied_to_parent(argv), stderr=log, stdout=log)

    def wait_ready(self) -> "KvCacheProcess":
        deadline = time.monotonic() + 30
        while not self.ready_file.exists():
            assert self.process.poll() is None, self.log
            assert time.monotonic() < deadline, self.log
            time.sleep(0.02)
        return self

    @property
    def log(self) -> str:
        return self.log_path.read_text()

    @property
    def address(self) -> str:
        return json.loads(self.ready_file.read_text())["address"]

    @property
    def metrics_address(self) -> str:
        return json.loads(self.ready_file.read_text())["metrics_address"]

    def channel(self) -> grpc.aio.Channel:
        return grpc.aio.insecure_channel(self.address)


@pytest.fixture
def start_kvcache(tmp_path: Path) -> Iterator[Callable[..., KvCacheProcess]]:
    """Starts services; does not wait for them."""
    started: list[KvCacheProcess] = []

    def start(url: str, **settings: Any) -> KvCacheProcess:
        directory = tmp_path / f"kvcache{len(started)}"
        directory.mkdir()
        started.append(KvCacheProcess(directory, url, **settings))
        return started[-1]

    yield start
    for service in started:
        service.process.kill()
        service.process.wait()


class Publisher:
    """A Publish stream by hand; answers are collected as they come."""

    def __init__(self, channel: grpc.aio.Channel, engine: str = "e", epoch: int = 1) -> None:
        self.engine, self.epoch, self.sequence = engine, epoch, 0
        self.call = prefix_index_pb2_grpc.PrefixIndexStub(channel).Publish()

    async def send(self, *hashes: bytes, part: int | None = None, last: bool = False) -> None:
        self.sequence += 1
        request = pb.PublishRequest(
            engine_id=self.engine, epoch_ms=self.epoch, sequence=self.sequence
        )
        for joined in hashes:
            request.events.add().stored.MergeFrom(
                pb.Stored(block_hashes=joined, kind=pb.BLOCK_KIND_HISTORY)
            )
        if part is not None:
            request.snapshot.MergeFrom(pb.SnapshotPart(part=part, last=last))
        await self.call.write(request)

    async def answer(self, wanted: Callable[[pb.PublishResponse], bool]) -> pb.PublishResponse:
        """The first answer that is wanted."""
        async with asyncio.timeout(20):
            while True:
                answer = await self.call.read()
                assert answer is not grpc.aio.EOF
                if wanted(answer):
                    return answer


@pytest.fixture
def publisher() -> type[Publisher]:
    return Publisher


class Asker:
    """Asks for a match again and again; every call has a deadline and must be answered in it."""

    def __init__(self, channel: grpc.aio.Channel, hashes: bytes) -> None:
        self._stub = prefix_index_pb2_grpc.PrefixIndexStub(channel)
        self._request = pb.MatchRequest(block_hashes=hashes)

    async def __call__(self) -> tuple[bool, int, float]:
        """Known, matched blocks of the best engine, seconds."""
        began = time.monotonic()
        reply = await self._stub.Match(self._request, timeout=1.0)
        took = time.monotonic() - began
        return reply.known, max((m.matched_blocks for m in reply.engines), default=0), took

    async def until(self, *, known: bool, blocks: int = 0, within_s: float = 10.0) -> None:
        async with asyncio.timeout(within_s):
            while (await self())[:2] != (known, blocks):  # noqa: ASYNC110
                await asyncio.sleep(0.02)


@pytest.fixture
def asker() -> type[Asker]:
    return Asker
