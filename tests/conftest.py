"""Real Redis and etcd processes for tests; they die with pytest, even when it is killed."""

import datetime
import ipaddress
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import redis
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

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


class Certificates(NamedTuple):
    """PEM files: a CA, and a certificate of it for 127.0.0.1 with its key."""

    ca: Path
    cert: Path
    key: Path


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    """For servers and clients on the loopback."""
    folder = tmp_path_factory.mktemp("certificates")
    files = Certificates(*(folder / f"{name}.pem" for name in Certificates._fields))
    ca_key, key = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    ca_name = _name("test ca")
    ca = _certificate(ca_name, ca_name, ca_key.public_key(), is_ca=True)
    cert = _certificate(_name("127.0.0.1"), ca_name, key.public_key(), is_ca=False)
    pem = serialization.Encoding.PEM
    files.ca.write_bytes(ca.sign(ca_key, hashes.SHA256()).public_bytes(pem))
    files.cert.write_bytes(cert.sign(ca_key, hashes.SHA256()).public_bytes(pem))
    files.key.write_bytes(
        key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return files


def _name(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def _certificate(subject: x509.Name, issuer: x509.Name, key: Any, *, is_ca: bool) -> Any:
    now = datetime.datetime.now(datetime.UTC)
    address = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.BasicConstraints(ca=is_ca, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName([address]), critical=False)
    )
