"""The stores get new certificates of a new CA; who is connected follows without a restart."""

import asyncio
import contextlib
import ssl

import pytest

from inferfleet_cli.supervisor.dev_backends import free_port
from services.common.config.redis_keys import RedisKeys
from services.common.config.redis_keys import connect as connect_redis
from services.common.etcd.client import EtcdUnavailableError
from services.common.etcd.config import EtcdKeys
from services.common.etcd.config import connect as connect_etcd
from services.common.rpc import tls_files

pytestmark = pytest.mark.services


@pytest.fixture(autouse=True)
def looks_at_once(monkeypatch):
    monkeypatch.setattr(tls_files, "CHECK_INTERVAL_S", 0.0)


async def until(condition, *errors):
    """The first answer that is no error."""
    async with asyncio.timeout(40):
        while True:
            try:
                return await condition()
            except errors:
                await asyncio.sleep(0.05)


async def test_etcd(make_authority, start_etcd, tmp_path):
    old, new = make_authority("old"), make_authority("new")
    files = old.issue(tmp_path / "certificates")
    plain, port = free_port(), free_port()
    secure = f"https://127.0.0.1:{port}"
    server = start_etcd(
        port=plain,
        extra=[
            f"--listen-client-urls=http://127.0.0.1:{plain},{secure}",
            *(f"--cert-file={files.cert}", f"--key-file={files.key}"),
            *(f"--trusted-ca-file={files.ca}", "--client-cert-auth"),
        ],
    )
    keys = EtcdKeys(
        etcd=(f"127.0.0.1:{port}",),
        etcd_tls_ca_file=str(files.ca),
        etcd_tls_cert_file=str(files.cert),
        etcd_tls_key_file=str(files.key),
    )
    etcd = connect_etcd(keys, timeout_s=5)
    await until(lambda: etcd.put("/k", b"1"), EtcdUnavailableError)
    server.stop()
    new.issue(tmp_path / "certificates")  # the old CA is no longer trusted
    server.launch()
    found = await until(lambda: etcd.get("/k"), EtcdUnavailableError)
    assert found.value == b"1"
    await etcd.close()


async def test_redis(make_authority, redis_url, tmp_path):
    """Redis behind a TLS front that asks for a certificate: the wheel's server speaks no TLS."""
    old, new = make_authority("old"), make_authority("new")
    files = old.issue(tmp_path)
    host, _, port = redis_url.removeprefix("redis://").removesuffix("/0").partition(":")

    async def pass_on(source, target):
        with contextlib.suppress(OSError):
            while chunk := await source.read(65536):
                target.write(chunk)
        target.close()

    async def serve(reader, writer):
        from_redis, to_redis = await asyncio.open_connection(host, int(port))
        await asyncio.gather(pass_on(reader, to_redis), pass_on(from_redis, writer))

    async def front(at):
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(files.ca))
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_cert_chain(files.cert, files.key)
        return await asyncio.start_server(serve, "127.0.0.1", at, ssl=context)

    first = await front(0)
    at = first.sockets[0].getsockname()[1]
    keys = RedisKeys(
        redis=f"rediss://127.0.0.1:{at}/0",
        redis_tls_ca_file=str(files.ca),
        redis_tls_cert_file=str(files.cert),
        redis_tls_key_file=str(files.key),
    )
    client = connect_redis(keys, timeout_s=5, name="test")
    await client.set("k", "1")
    first.close()
    await client.connection_pool.disconnect()
    new.issue(tmp_path)
    second = await front(at)
    assert await client.get("k") == b"1"
    await client.aclose()
    await client.connection_pool.disconnect()
    second.close()
