"""Maps API keys to identities. Keys are known by their hashes, from a file that may change."""

import asyncio
import hashlib
import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from services.common.config.settings import ConfigError
from services.common.errors import UnauthenticatedError
from services.gateway.callers.keys_file import Identity, parse_keys

log = logging.getLogger(__name__)

CHECK_FILE_EVERY_S = 1.0
ANONYMOUS = Identity()

FileStamp = tuple[int, int, int]
"""Modification time in ns, inode and size of a file."""


class Tenants:
    """Identifies callers by their keys. Without a file every caller is anonymous.

    Args:
        path: of the keys file; empty: no key is required.
        clock: seconds.
        on_reload: called after each reading of a changed file: whether it could be used, and a
            description or the problem.

    Raises:
        ConfigError: the file cannot be read or has a bad line.
    """

    def __init__(
        self,
        path: str,
        clock: Callable[[], float] = time.monotonic,
        on_reload: Callable[[bool, str], None] = lambda usable, description: None,
    ) -> None:
        self._path = Path(path) if path else None
        self._clock = clock
        self._on_reload = on_reload
        self._stamp: FileStamp | None = None
        """None while the file cannot be found."""
        self._checked_s = clock()
        self._by_digest: Mapping[str, Identity] = {}
        if self._path is not None:
            self._stamp = _stamp_of(self._path)
            self._by_digest = _read_keys(self._path)

    def identify(self, authorization: str | None) -> Identity:
        """The identity behind an `authorization` header or metadata value.

        Raises:
            UnauthenticatedError: a key is required, and this is missing or not valid.
        """
        if self._path is None:
            return ANONYMOUS
        self._reload_if_due(self._path)
        scheme, _, key = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            raise UnauthenticatedError(
                "send your API key as `authorization: Bearer <key>`", reason="MISSING_API_KEY"
            )
        # Looked up by hash: neither the time nor a leaked file reveals anything about a key.
        digest = hashlib.sha256(key.strip().encode()).hexdigest()
        found = self._by_digest.get(digest)
        if found is None:
            raise UnauthenticatedError("invalid API key", reason="INVALID_API_KEY")
        return found

    async def follow(self) -> None:
        """Check the file for changes forever, so that operators see problems before callers do."""
        while True:
            await asyncio.sleep(CHECK_FILE_EVERY_S)
            if self._path is not None:
                self._checked_s = self._clock()
                self._reload_if_changed(self._path)

    def _reload_if_due(self, path: Path) -> None:
        now = self._clock()
        if now - self._checked_s >= CHECK_FILE_EVERY_S:
            self._checked_s = now
            self._reload_if_changed(path)

    def _reload_if_changed(self, path: Path) -> None:
        before, self._stamp = self._stamp, None
        try:
            self._stamp = _stamp_of(path)
            if self._stamp == before:
                return
            self._by_digest = _read_keys(path)
        except ConfigError as error:
            if self._stamp != before:  # report a problem once, not at every check
                log.warning("keeping the last valid API keys: %s", error)
                self._on_reload(False, str(error))
            return
        log.info("read %d API keys", len(self._by_digest))
        self._on_reload(True, f"{len(self._by_digest)} keys")


def _stamp_of(path: Path) -> FileStamp:
    try:
        found = path.stat()
    except OSError as error:
        raise ConfigError(f"api_keys_file: cannot read {path}: {error.strerror}") from error
    return found.st_mtime_ns, found.st_ino, found.st_size


def _read_keys(path: Path) -> Mapping[str, Identity]:
    try:
        keys = parse_keys(path.read_text())
    except UnicodeDecodeError as error:
        raise ConfigError(f"api_keys_file: cannot read {path}: {error}") from error
    except OSError as error:
        raise ConfigError(f"api_keys_file: cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"api_keys_file: {path} {error}") from error
    if not keys:  # often a file that is being rewritten right now
        raise ConfigError(f"api_keys_file: {path} has no key")
    return keys
