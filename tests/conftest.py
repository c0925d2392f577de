"""Real Redis and etcd processes for tests; they die with pytest, even when it is killed."""

import datetime
import ipaddress
import itertools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import redis
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from hypothesis import settings

from inferfleet_cli.supervisor.dev_backends import EtcdProcess, RedisProcess, ServerProcess

# Triton's interpreter runs the very kernels on a CPU. It must be chosen before Triton is imported,
# by whichever test; `make gpu` says 0.
os.environ.setdefault("TRITON_INTERPRET", "1")

# A deadline for each example would judge how busy the machine is.
settings.register_profile("inferfleet", deadline=None)
settings.load_profile("inferfleet")


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


_PEM = serialization.Encoding.PEM


class Certificates(NamedTuple):
    """PEM files: a CA, and a certificate of it for 127.0.0.1 with its key."""

    ca: Path
    cert: Path
    key: Path


class Authority:
    """A CA that issues certificates for localhost, 127.0.0.1 and whoever else."""

    def __init__(self, name: str = "test ca") -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _name(name)
        made = _certificate(self._name, self._name, self._key.public_key(), is_ca=True)
        self.pem: bytes = made.sign(self._key, hashes.SHA256()).public_bytes(_PEM)

    def issue(self, folder: Path, *trusted: bytes, name: str = "127.0.0.1") -> Certificates:
        """Write ca.pem (this CA, and `trusted`), cert.pem and key.pem, each whole or not at all."""
        files = Certificates(*(folder / f"{part}.pem" for part in Certificates._fields))
        key = ec.generate_private_key(ec.SECP256R1())
        cert = _certificate(_name(name), self._name, key.public_key(), is_ca=False)
        private = (serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        contents = (
            self.pem + b"".join(trusted),
            cert.sign(self._key, hashes.SHA256()).public_bytes(_PEM),
            key.private_bytes(_PEM, *private),
        )
        folder.mkdir(parents=True, exist_ok=True)
        for path, content in zip(files, contents, strict=True):
            path.with_suffix(".new").write_bytes(content)
            path.with_suffix(".new").replace(path)
        return files


@pytest.fixture(scope="session")
def make_authority() -> type[Authority]:
    """Makes CAs."""
    return Authority


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    """For servers and clients on the loopback."""
    folder = tmp_path_factory.mktemp("certificates")
    return Authority().issue(folder)


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
        .add_extension(
            x509.SubjectAlternativeName([address, x509.DNSName("localhost")]), critical=False
        )
    )
