"""The stores of a local fleet let nobody in without the password of the state directory."""

import asyncio
import os
import signal
import socket
import stat
from concurrent.futures import ThreadPoolExecutor

import pytest

from inferfleet_cli.supervisor.ports import take
from inferfleet_cli.supervisor.state_dir import StateDir
from inferfleet_cli.supervisor.stores import make_stores
from services.common.etcd.client import Etcd, EtcdRefusedError


@pytest.fixture
async def stores(tmp_path):
    """The state directory, Redis, etcd, and an event that is set when etcd is back."""
    back = asyncio.Event()

    def on_event(line):
        if line == "etcd is back":
            back.set()

    state = StateDir(tmp_path / "state")
    state.claim()
    with ThreadPoolExecutor(1) as thread:
        made = make_stores(state, tuple(take(2)), thread, on_event)
        await asyncio.gather(*(store.start() for store in made))
        yield state, *made, back
        for store in made:
            await store.stop()
    state.release()
    assert not state.store_password_file.exists()


def ask_redis(address, *lines):
    host, _, port = address.partition(":")
    with socket.create_connection((host, int(port)), 5) as connection:
        connection.sendall("".join(f"{line}\r\n" for line in lines).encode())
        return connection.recv(4096)


async def test_only_the_password_lets_in(stores):
    state, redis, etcd, back = stores
    password = state.store_password()
    assert stat.S_IMODE(state.store_password_file.stat().st_mode) == 0o600
    assert b"NOAUTH" in ask_redis(redis.status().address, "GET a")
    assert ask_redis(redis.status().address, f"AUTH {password}").startswith(b"+OK")
    stranger = Etcd([etcd.status().address])
    with pytest.raises(EtcdRefusedError):
        await stranger.put("/inferfleet/engines/x", b"{}")
    member = Etcd([etcd.status().address], user="root", password=password)
    await member.put("/inferfleet/a", b"1")
    os.kill(etcd.status().pid, signal.SIGKILL)
    async with asyncio.timeout(30):
        await back.wait()
    later = Etcd([etcd.status().address])
    with pytest.raises(EtcdRefusedError):
        await later.get("/inferfleet/a")
    for client in (stranger, member, later):
        await client.close()
