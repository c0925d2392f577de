"""The etcd client against real servers: calls, watches, and what happens when etcd does not."""

import asyncio
import time
from contextlib import aclosing

import grpc
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from etcd3 import etcdrpc

from inferfleet_cli.supervisor.dev_backends import free_port
from services.common.etcd.client import (
    Changes,
    Compare,
    Delete,
    Etcd,
    EtcdRefusedError,
    EtcdUnavailableError,
    LeaseNotFoundError,
    Listing,
    Lost,
    Put,
    Tls,
    parse_endpoint,
)
from tests.doubles.etcd_keys import compact

pytestmark = pytest.mark.services


@pytest.fixture
async def etcd(etcd_endpoint):
    client = Etcd([etcd_endpoint])
    yield client
    await client.close()


async def until(items, wanted, within_s=20.0):
    """The first item of a watch that is wanted."""
    async with asyncio.timeout(within_s):
        async for item in items:
            if wanted(item):
                return item
    raise AssertionError("the watch ended")


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        ("127.0.0.1:2379", ("127.0.0.1:2379", False)),
        ("http://etcd:2379/", ("etcd:2379", False)),
        ("https://etcd.example:2379", ("etcd.example:2379", True)),
        ("[::1]:2379", ("[::1]:2379", False)),
    ],
)
def test_endpoints(text, parsed):
    assert parse_endpoint(text) == parsed


@pytest.mark.parametrize("text", ["", "etcd", "etcd:", ":2379", "ftp://etcd:1", "etcd:x"])
def test_bad_endpoints(text):
    with pytest.raises(ValueError, match="is not host:port"):
        parse_endpoint(text)


async def test_keys(etcd, etcd_prefix):
    key = f"{etcd_prefix}a"
    assert await etcd.get(key) is None
    revision = await etcd.put(key, b"1")
    found = await etcd.get(key)
    assert (found.value, found.create_revision, found.mod_revision) == (b"1", revision, revision)
    second = await etcd.put(key, b"2")
    assert (await etcd.get(key)).create_revision == revision
    assert (await etcd.get(key)).mod_revision == second
    await etcd.put(f"{etcd_prefix}b", b"")
    listing = await etcd.get_prefix(etcd_prefix)
    assert {k: v.value for k, v in listing.items.items()} == {key: b"2", f"{etcd_prefix}b": b""}
    assert await etcd.delete(key)
    assert not await etcd.delete(key)


async def test_compare_and_put_lets_one_win(etcd, etcd_prefix):
    key = f"{etcd_prefix}a"
    wins = await asyncio.gather(
        *(etcd.compare_and_put(key, bytes([i]), mod_revision=0) for i in range(8))
    )
    (revision,) = [win for win in wins if win is not None]
    assert await etcd.compare_and_put(key, b"x", mod_revision=revision - 1) is None
    assert await etcd.compare_and_put(key, b"x", mod_revision=revision) == revision + 1


async def test_a_transaction_is_all_or_nothing(etcd, etcd_prefix):
    a, b = f"{etcd_prefix}a", f"{etcd_prefix}b"
    await etcd.put(a, b"1")
    failed = await etcd.transaction([Compare(a, "value", b"2")], [Put(a, b"3"), Put(b, b"3")])
    assert failed is None
    assert await etcd.get(b) is None
    done = await etcd.transaction([Compare(a, "value", b"1")], [Delete(a), Put(b, b"3")])
    assert done == (await etcd.get(b)).mod_revision
    assert await etcd.get(a) is None


async def test_leases(etcd, etcd_prefix):
    lease = await etcd.grant_lease(30)
    await etcd.put(f"{etcd_prefix}a", b"1", lease=lease)
    assert 1 <= await etcd.keep_alive(lease) <= 30
    await etcd.revoke_lease(lease)
    assert await etcd.get(f"{etcd_prefix}a") is None
    await etcd.revoke_lease(lease)  # gone already: no error
    with pytest.raises(LeaseNotFoundError):
        await etcd.keep_alive(lease)
    with pytest.raises(LeaseNotFoundError):
        await etcd.put(f"{etcd_prefix}a", b"1", lease=lease)


async def test_a_refusal_is_not_an_outage(etcd, etcd_prefix):
    with pytest.raises(EtcdRefusedError) as raised:
        await etcd.put("", b"1")
    assert not isinstance(raised.value, EtcdUnavailableError)


async def test_a_watch_lists_and_follows(etcd, etcd_prefix):
    a, b = f"{etcd_prefix}a", f"{etcd_prefix}b"
    await etcd.put(a, b"1")
    async with aclosing(etcd.watch_prefix(etcd_prefix)) as items:
        listing = await until(items, lambda i: True)
        assert isinstance(listing, Listing)
        assert list(listing.items) == [a]
        await etcd.put("/elsewhere", b"")
        await etcd.put(b, b"2")
        changes = await until(items, lambda i: True)
        assert [(c.key, c.value.value) for c in changes.changes] == [(b, b"2")]
        await etcd.delete(a)
        changes = await until(items, lambda i: True)
        assert [(c.key, c.value) for c in changes.changes] == [(a, None)]


async def test_one_transaction_is_one_batch(etcd, etcd_prefix):
    keys = [f"{etcd_prefix}{i}" for i in range(50)]
    async with aclosing(etcd.watch_prefix(etcd_prefix)) as items:
        await until(items, lambda i: isinstance(i, Listing))
        for round_ in range(3):
            await etcd.transaction([], [Put(key, bytes([round_])) for key in keys])
            changes = await until(items, lambda i: isinstance(i, Changes))
            assert {c.key for c in changes.changes} == set(keys)


async def test_an_idle_watch_stays_up(etcd, etcd_prefix, monkeypatch):
    monkeypatch.setattr("services.common.etcd.client.WATCH_PROBE_S", 0.2)
    async with aclosing(etcd.watch_prefix(etcd_prefix)) as items:
        await until(items, lambda i: isinstance(i, Listing))
        following = asyncio.ensure_future(until(items, lambda i: True))
        await asyncio.wait({following}, timeout=2.0)
        assert not following.done()
        await etcd.put(f"{etcd_prefix}a", b"1")
        assert isinstance(await following, Changes)


async def test_a_compacted_history_is_listed_again(etcd, etcd_prefix, monkeypatch):
    original = etcd.get_prefix
    await etcd.put(f"{etcd_prefix}ghost", b"")
    old = await etcd.get_prefix(etcd_prefix)
    listings = [old]
    await etcd.delete(f"{etcd_prefix}ghost")
    await compact(etcd, await etcd.put(f"{etcd_prefix}a", b"1"))

    async def listed_before_the_compaction(prefix):
        return listings.pop() if listings else await original(prefix)

    monkeypatch.setattr(etcd, "get_prefix", listed_before_the_compaction)
    async with aclosing(etcd.watch_prefix(etcd_prefix)) as items:
        assert (await until(items, lambda i: True)) == old
        lost = await until(items, lambda i: True)
        assert isinstance(lost, Lost)
        assert "compacted" in lost.reason
        listing = await until(items, lambda i: True)
        assert list(listing.items) == [f"{etcd_prefix}a"]


async def test_the_second_endpoint_answers_for_the_first(etcd_endpoint, etcd_prefix):
    for _ in range(4):  # the first endpoint is drawn at random
        client = Etcd([f"127.0.0.1:{free_port()}", etcd_endpoint])
        await client.put(f"{etcd_prefix}a", b"1")
        await client.compare_and_put(f"{etcd_prefix}b", b"1", mod_revision=0)
        async with aclosing(client.watch_prefix(etcd_prefix)) as items:
            await until(items, lambda i: isinstance(i, Listing))
            await client.put(f"{etcd_prefix}a", b"2")
            await until(items, lambda i: isinstance(i, Changes))
        await client.close()


async def test_nobody_there_is_an_error_in_bounded_time():
    client = Etcd([f"127.0.0.1:{free_port()}"], timeout_s=0.5)
    began = time.monotonic()
    for call in (client.get("a"), client.keep_alive(1), client.transaction([], [])):
        with pytest.raises(EtcdUnavailableError):
            await call
    assert time.monotonic() - began < 5
    await client.close()
    with pytest.raises(EtcdUnavailableError):
        await client.get("a")


async def test_a_paused_etcd(start_etcd, monkeypatch):
    monkeypatch.setattr("services.common.etcd.client.WATCH_PROBE_S", 0.5)
    server = start_etcd()
    client = Etcd([server.address], timeout_s=0.5)
    await client.put("/p/a", b"1")
    async with aclosing(client.watch_prefix("/p/")) as items:
        await until(items, lambda i: isinstance(i, Listing))
        server.pause()
        began = time.monotonic()
        with pytest.raises(EtcdUnavailableError):
            await client.put("/p/a", b"2")
        with pytest.raises(EtcdUnavailableError):
            await client.keep_alive(1)
        assert time.monotonic() - began < 3
        assert isinstance(await until(items, lambda i: True), Lost)
        server.resume()
        listing = await until(items, lambda i: True)
        assert list(listing.items) == ["/p/a"]
        await client.put("/p/b", b"3")
        await until(items, lambda i: isinstance(i, Changes) and i.changes[0].key == "/p/b")
    server.pause()
    pending = asyncio.ensure_future(client.get("/p/a"))
    await asyncio.sleep(0.05)
    began = time.monotonic()
    await client.close()
    with pytest.raises(EtcdUnavailableError):
        await pending
    assert time.monotonic() - began < 2


async def test_a_killed_etcd_comes_back_with_its_data_and_without(start_etcd):
    server = start_etcd()
    client = Etcd([server.address])
    await client.put("/p/a", b"1")
    async with aclosing(client.watch_prefix("/p/")) as items:
        await until(items, lambda i: isinstance(i, Listing))
        server.kill()
        assert isinstance(await until(items, lambda i: True), Lost)
        server.launch()
        listing = await until(items, lambda i: True)
        assert {k: v.value for k, v in listing.items.items()} == {"/p/a": b"1"}
        server.kill()
        server.erase()
        assert isinstance(await until(items, lambda i: True), Lost)
        server.launch()
        listing = await until(items, lambda i: True)
        assert (listing.items, listing.revision) == ({}, 1)
        await client.put("/p/new", b"1")
        changes = await until(items, lambda i: isinstance(i, Changes))
        assert changes.changes[0].key == "/p/new"
    await client.close()


async def test_a_store_that_went_back_is_listed_again(etcd, etcd_prefix, monkeypatch):
    await etcd.put(f"{etcd_prefix}a", b"1")
    original = etcd.get_prefix
    listings = [Listing(10**9, {})]

    async def listed_before_the_restore(prefix):
        return listings.pop() if listings else await original(prefix)

    monkeypatch.setattr(etcd, "get_prefix", listed_before_the_restore)
    async with aclosing(etcd.watch_prefix(etcd_prefix)) as items:
        assert not (await until(items, lambda i: True)).items
        assert "older state" in (await until(items, lambda i: True)).reason
        assert list((await until(items, lambda i: True)).items) == [f"{etcd_prefix}a"]


async def test_user_and_password(start_etcd):
    server = start_etcd(extra=["--auth-token-ttl=1"])
    enable_authentication(server.address)
    anonymous = Etcd([server.address])
    with pytest.raises(EtcdRefusedError):
        await anonymous.get("a")
    wrong = Etcd([server.address], user="root", password="wrong")
    with pytest.raises(EtcdRefusedError, match="authentication failed"):
        await wrong.get("a")
    client = Etcd([server.address], user="root", password="right")
    await client.put("a", b"1")
    await asyncio.sleep(2.5)  # the token's life
    assert (await client.get("a")).value == b"1"
    for each in (anonymous, wrong, client):
        await each.close()


def enable_authentication(address):
    with grpc.insecure_channel(address) as channel:
        auth = etcdrpc.AuthStub(channel)
        auth.UserAdd(etcdrpc.AuthUserAddRequest(name="root", password="right"))
        auth.UserGrantRole(etcdrpc.AuthUserGrantRoleRequest(user="root", role="root"))
        auth.AuthEnable(etcdrpc.AuthEnableRequest())


async def test_a_new_user_voids_jwt_tokens_and_the_client_gets_another_at_once(  # R2-20
    start_etcd, tmp_path
):
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    private, public = tmp_path / "jwt.key", tmp_path / "jwt.pub"
    pem, plain = serialization.Encoding.PEM, serialization.NoEncryption()
    private.write_bytes(
        key.private_bytes(pem, serialization.PrivateFormat.TraditionalOpenSSL, plain)
    )
    kind = serialization.PublicFormat.SubjectPublicKeyInfo
    public.write_bytes(key.public_key().public_bytes(pem, kind))
    token = f"jwt,pub-key={public},priv-key={private},sign-method=RS256,ttl=10m"
    server = start_etcd(extra=[f"--auth-token={token}"])
    enable_authentication(server.address)
    client = Etcd([server.address], user="root", password="right")
    lease = await client.grant_lease(60)
    for number, call in enumerate(
        (
            lambda: client.get("a"),
            lambda: client.compare_and_put("a", b"1", mod_revision=0),
            lambda: client.keep_alive(lease),
        )
    ):
        member = client._members[0]
        user = etcdrpc.AuthUserAddRequest(name=f"user{number}", password="p")
        await member.auth.UserAdd(user, metadata=member.metadata)
        await call()
    await client.close()


async def test_mutual_tls(start_etcd, certificates):
    port, tls_port = free_port(), free_port()
    secure = f"https://127.0.0.1:{tls_port}"
    start_etcd(
        port=port,
        extra=[
            f"--listen-client-urls=http://127.0.0.1:{port},{secure}",
            f"--cert-file={certificates.cert}",
            f"--key-file={certificates.key}",
            f"--trusted-ca-file={certificates.ca}",
            "--client-cert-auth",
        ],
    )
    ca, cert, key = (path.read_bytes() for path in certificates)
    member = Etcd([secure], tls=Tls(ca, cert, key))
    await member.put("a", b"1")
    async with aclosing(member.watch_prefix("a")) as items:
        assert (await until(items, lambda i: True)).items["a"].value == b"1"
    anonymous = Etcd([secure], tls=Tls(ca), timeout_s=1.0)
    plain = Etcd([f"127.0.0.1:{tls_port}"], timeout_s=1.0)
    for outsider in (anonymous, plain):
        with pytest.raises(EtcdUnavailableError):
            await outsider.get("a")
        await outsider.close()
    await member.close()


async def test_nothing_is_left_behind(etcd_endpoint, etcd_prefix):
    before = asyncio.all_tasks()
    client = Etcd([etcd_endpoint])
    async with aclosing(client.watch_prefix(etcd_prefix)) as items:
        await until(items, lambda i: isinstance(i, Listing))
        await client.put(f"{etcd_prefix}a", b"1")
        await until(items, lambda i: isinstance(i, Changes))
    await client.close()
    await client.close()
    async with asyncio.timeout(5):
        # gRPC's own end a moment later.
        while not asyncio.all_tasks() <= before:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
