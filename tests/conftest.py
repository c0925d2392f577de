"""Real Redis and etcd processes for tests; they die with pytest, even when it is killed."""

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from services.common.backing import EtcdProcess, RedisProcess, ServerProcess


@pytest.fixture(scope="session")
def _redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisProcess]:
    server = RedisProcess.start(tmp_path_factory.mktemp("redis"))
    yield server
    server.stop()


@pytest.fixture(scope="session")
def _etcd_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdProcess]:
    server = EtcdProcess.start(tmp_path_factory.mktemp("etcd"))
    yield server
    server.stop()


@pytest.fixture
def redis_url(_redis_server: RedisProcess) -> str:
    """URL of an empty Redis that all tests of the session share."""
    with redis.Redis.from_url(_redis_server.url) as client:
        client.flushall()
    return _redis_server.url


@pytest.fixture
def etcd_endpoint(_etcd_server: EtcdProcess) -> str:
    """host:port of an etcd that all tests of the session share; take keys under `etcd_prefix`."""
    return _etcd_server.address


_prefixes = itertools.count()


@pytest.fixture
def etcd_prefix() -> str:
    """A key prefix that no other test of the session uses."""
    return f"/test/{next(_prefixes)}/"


@pytest.fixture
def start_redis(tmp_path: Path) -> Iterator[Callable[..., RedisProcess]]:
    """Starts servers of this test's own, to stop and pause; takes what RedisProcess.start takes."""
    yield from _starter(RedisProcess, tmp_path / "redis")


@pytest.fixture
def start_etcd(tmp_path: Path) -> Iterator[Callable[..., EtcdProcess]]:
    """Starts servers of this test's own, to stop and pause; takes what EtcdProcess.start takes."""
    yield from _starter(EtcdProcess, tmp_path / "etcd")


def _starter(cls: Any, directory: Path) -> Iterator[Callable[..., Any]]:
    started: list[ServerProcess] = []

    def start(**arguments: Any) -> Any:
        server = cls.start(directory / str(len(started)), **arguments)
        started.append(server)
        return server

    yield start
    for server in started:
        server.kill()
