"""The state directory of a local fleet; mode 0700.

supervisor.lock   locked while a fleet runs; holds the supervisor's process id
fleet.json        the addresses of the fleet; replaced atomically, by the supervisor only
fleet.token       the secret that the fleet's services show to each other; mode 0600
stores.password   of the Redis and etcd that the fleet starts; mode 0600
logs/ ready/      a log and a ready file per service
redis/ etcd/      data of the stores; emptied at each start
tiny/             models with random weights, of `--model tiny:NAME`
"""

import contextlib
import fcntl
import json
import os
import secrets
import shlex
import shutil
from pathlib import Path
from typing import IO, Any

from inferfleet_cli.errors import CliError

DEFAULT = Path(".inferfleet")

_OWN = {"supervisor.lock", "fleet.json", "fleet.token", "stores.password"}
_OWN |= {"logs", "ready", "redis", "etcd", "tiny"}


class StateDir:
    """The state directory of one fleet; at most one supervisor claims it at a time."""

    def __init__(self, root: Path) -> None:
        self.root = root.absolute()
        self.logs = self.root / "logs"
        self.tiny_models = self.root / "tiny"
        self.token_file = self.root / "fleet.token"
        self.store_password_file = self.root / "stores.password"
        self._record = self.root / "fleet.json"
        self._lock_file = self.root / "supervisor.lock"
        self._lock: IO[str] | None = None

    def claim(self) -> None:
        """Lock the directory for this process and delete the files of an earlier run; idempotent.

        Raises:
            CliError: another fleet runs here, or the directory cannot be written.
        """
        if self._lock is not None:
            return
        self.make()
        try:
            lock = self._lock_file.open("a")
        except OSError as error:
            raise self._unusable(error) from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            raise self._taken() from None
        self._lock = lock
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
        self._record.unlink(missing_ok=True)
        for name in ("ready", "redis", "etcd"):
            shutil.rmtree(self.root / name, ignore_errors=True)
            (self.root / name).mkdir(mode=0o700)
        for file in (self.token_file, self.store_password_file):
            _write_secret(file)

    def make(self) -> None:
        """Create the directory and its logs/, if they do not exist; only the user may enter it.

        A directory with files of others keeps its mode: somebody else may need it.

        Raises:
            CliError: they cannot be created.
        """
        try:
            self.root.parent.mkdir(parents=True, exist_ok=True)
            self.root.mkdir(mode=0o700, exist_ok=True)
            if {path.name for path in self.root.iterdir()} <= _OWN:
                self.root.chmod(0o700)  # also one that an earlier version made
            self.logs.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            raise self._unusable(error) from error

    def require_free(self) -> None:
        """Raises:
        CliError: another fleet runs here.
        """
        if self.is_claimed():
            raise self._taken()

    def release(self) -> None:
        """Give the directory up; idempotent, and without effect if it is not claimed."""
        if self._lock is None:
            return
        self._record.unlink(missing_ok=True)
        for file in (self.token_file, self.store_password_file):
            file.unlink(missing_ok=True)
        self._lock.close()
        self._lock = None

    def remove(self) -> None:
        """Delete a fleet's files, and the directory if it is then empty; other files stay.

        Raises:
            CliError: another fleet runs here.
        """
        self.claim()
        for name in ("logs", "ready", "redis", "etcd", "tiny"):
            shutil.rmtree(self.root / name, ignore_errors=True)
        self.release()
        self._lock_file.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # not empty
            self.root.rmdir()

    def is_claimed(self) -> bool:
        """Whether the supervisor of any process claims the directory now."""
        try:
            with self._lock_file.open("a") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (FileNotFoundError, NotADirectoryError):
            return False
        except BlockingIOError:
            return True
        return False

    def owner_pid(self) -> int | None:
        """Process id of the supervisor that claims the directory; None if none does."""
        if not self.is_claimed():
            return None
        with contextlib.suppress(OSError, ValueError):
            return int(self._lock_file.read_text())
        return None

    def write_record(self, record: dict[str, Any]) -> None:
        """Replace fleet.json."""
        scratch = self._record.with_suffix(".tmp")
        scratch.write_text(json.dumps(record, indent=2))
        scratch.replace(self._record)

    def read_record(self) -> dict[str, Any] | None:
        """The content of fleet.json; None if no fleet serves here."""
        with contextlib.suppress(OSError, ValueError):
            record = json.loads(self._record.read_text())
            if isinstance(record, dict) and self.is_claimed():
                return record
        return None

    def token(self) -> str:
        """The token of the running fleet."""
        return self.token_file.read_text().strip()

    def store_password(self) -> str:
        """The password of the fleet's own Redis and etcd."""
        return self.store_password_file.read_text().strip()

    def log_file(self, name: str) -> Path:
        return self.logs / f"{name}.log"

    def ready_file(self, name: str) -> Path:
        return self.root / "ready" / f"{name}.json"

    def data_dir(self, store: str) -> Path:
        return self.root / store

    def _taken(self) -> CliError:
        return CliError(
            f"a fleet already runs in {self.root}: stop it with"
            f" `inferfleet down{flag(self.root)}`, or choose another --state-dir"
        )

    def _unusable(self, error: OSError) -> CliError:
        return CliError(f"cannot use the state directory {self.root}: {error}")


def _write_secret(path: Path) -> None:
    path.unlink(missing_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    with os.fdopen(os.open(path, flags, 0o600), "w") as file:
        file.write(secrets.token_urlsafe(32))


def flag(root: Path) -> str:
    """The flag that names this directory on a command line; "" for the default directory."""
    return "" if root == DEFAULT else f" --state-dir {shlex.quote(str(root))}"


def require_record(root: Path) -> dict[str, Any]:
    """The content of fleet.json of a running fleet.

    Raises:
        CliError: no fleet runs in the directory.
    """
    record = StateDir(root).read_record()
    if record is None:
        raise CliError(f"no fleet runs in {root}: start one with `inferfleet up{flag(root)}`")
    return record
