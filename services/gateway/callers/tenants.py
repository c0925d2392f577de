"""Who is calling: API keys, known only by their hashes, in a file that may change at any time."""

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

LOOK_AGAIN_S = 1.0
FOLLOW_S = 1.0
ANONYMOUS = Identity()


class Tenants:
    """Tells a caller's identity from its key.

    Args:
        told: of each reading of a changed file, whether it was good and what it said.

    Raises:
        ConfigError: the file cannot be read or has a bad line.
    """

    def __init__(
        self,
        path: str,
        clock: Callable[[], float] = time.monotonic,
        told: Callable[[bool, str], None] = lambda good, what: None,
    ) -> None:
        self._path = Path(path) if path else None
        self._clock = clock
        self._told = told
        self._stamp: tuple[int, int, int] | None = None  # None: the file is gone
        self._looked_s = clock()
        self._by_digest: Mapping[str, Identity] = {}
        if self._path is not None:
            self._stamp = _stamp(self._path)
            self._by_digest = _read(self._path)

    def identify(self, authorization: str | None) -> Identity:
        """Who is behind an `authorization` header or metadata value.

        Raises:
            UnauthenticatedError: a key is needed and this is none, or nobody's.
        """
        if self._path is None:
            return ANONYMOUS
        self._look_again()
        scheme, _, key = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            raise UnauthenticatedError(
                "send your API key as `authorization: Bearer <key>`", reason="MISSING_API_KEY"
            )
        # Looked up by hash, so neither the time nor a leaked file tells anything of a key.
        digest = hashlib.sha256(key.strip().encode()).hexdigest()
        found = self._by_digest.get(digest)
        if found is None:
            raise UnauthenticatedError("nobody has this API key", reason="INVALID_API_KEY")
        return found

    async def follow(self) -> None:
        """Look for changes for ever: an operator is to be told of them before anybody calls."""
        while True:
            await asyncio.sleep(FOLLOW_S)
            self._looked_s = self._clock()
            self._look()

    def _look_again(self) -> None:
        now = self._clock()
        if self._path is None or now - self._looked_s < LOOK_AGAIN_S:
            return
        self._looked_s = now
        self._look()

    def _look(self) -> None:
        if self._path is None:
            return
        before, self._stamp = self._stamp, None
        try:
            self._stamp = _stamp(self._path)
            if self._stamp == before:
                return
            self._by_digest = _read(self._path)
        except ConfigError as error:
            if self._stamp != before:  # told of once, not with every look
                log.warning("keeping the last good keys: %s", error)
                self._told(False, str(error))
            return
        log.info("read %d API keys", len(self._by_digest))
        self._told(True, f"{len(self._by_digest)} keys")


def _stamp(path: Path) -> tuple[int, int, int]:
    try:
        found = path.stat()
    except OSError as error:
        raise ConfigError(f"api_keys_file: cannot read {path}: {error.strerror}") from error
    return found.st_mtime_ns, found.st_ino, found.st_size


def _read(path: Path) -> Mapping[str, Identity]:
    try:
        keys = parse_keys(path.read_text())
    except UnicodeDecodeError as error:
        raise ConfigError(f"api_keys_file: cannot read {path}: {error}") from error
    except OSError as error:
        raise ConfigError(f"api_keys_file: cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"api_keys_file: {path} {error}") from error
    if not keys:  # often a file that is just being written anew
        raise ConfigError(f"api_keys_file: {path} has no key")
    return keys
