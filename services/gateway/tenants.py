"""Who is calling: API keys, known only by their hashes, in a file that may change at any time."""

import hashlib
import logging
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from services.common.config import ConfigError
from services.common.errors import UnauthenticatedError

log = logging.getLogger(__name__)

LOOK_AGAIN_S = 1.0
ANONYMOUS = ""
_LINE = re.compile(r"(?P<tenant>[\x21-\x7e]{1,128})\s+sha256:(?P<digest>[0-9a-fA-F]{64})")


class Tenants:
    """Tells a caller's tenant from its key.

    Raises:
        ConfigError: the file cannot be read or has a bad line.
    """

    def __init__(self, path: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._path = Path(path) if path else None
        self._clock = clock
        self._stamp: tuple[int, int] | None = None
        self._looked_s = clock()
        self._by_digest: Mapping[str, str] = {}
        if self._path is not None:
            self._by_digest = _read(self._path)
            self._stamp = _stamp(self._path)

    def tenant_of(self, authorization: str | None) -> str:
        """The tenant behind an `authorization` header or metadata value.

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
        tenant = self._by_digest.get(digest)
        if tenant is None:
            raise UnauthenticatedError("nobody has this API key", reason="INVALID_API_KEY")
        return tenant

    def _look_again(self) -> None:
        now = self._clock()
        if self._path is None or now - self._looked_s < LOOK_AGAIN_S:
            return
        self._looked_s = now
        try:
            stamp = _stamp(self._path)
            if stamp == self._stamp:
                return
            self._by_digest = _read(self._path)
        except ConfigError as error:
            log.warning("keeping the last good keys: %s", error)
            return
        self._stamp = stamp
        log.info("read %d API keys", len(self._by_digest))


def _stamp(path: Path) -> tuple[int, int]:
    try:
        found = path.stat()
    except OSError as error:
        raise ConfigError(f"api_keys_file: cannot read {path}: {error.strerror}") from error
    return found.st_mtime_ns, found.st_ino


def _read(path: Path) -> dict[str, str]:
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"api_keys_file: cannot read {path}: {error}") from error
    keys: dict[str, str] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        found = _LINE.fullmatch(line.strip())
        if found is None:
            raise ConfigError(
                f"api_keys_file: {path} line {number} is not `tenant sha256:<64 hex digits>`"
            )
        keys[found["digest"].lower()] = found["tenant"]
    return keys
