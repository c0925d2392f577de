"""Certificates whose files are replaced while a service runs, by cert-manager or a renewal job."""

import logging
import ssl
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

log = logging.getLogger(__name__)

CHECK_INTERVAL_S = 1.0
_Stamp = tuple[tuple[int, int, int], ...]


@dataclass(frozen=True)
class Pems:
    """The content of the files; None for a file that is not configured."""

    ca: bytes | None
    cert: bytes | None
    key: bytes | None


class TlsFiles:
    """The newest content of the files that fits together; thread-safe.

    While a certificate and its key do not fit, for example half-way through a replacement, the
    last good ones stay in use and a warning is logged.

    Args:
        ca, cert, key: paths; empty for none. cert and key are given together.

    Raises:
        OSError: a file cannot be read.
        ValueError: a file is not PEM, or the key does not belong to the certificate.
    """

    def __init__(
        self,
        ca: str = "",
        cert: str = "",
        key: str = "",
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ca, self._cert, self._key = ca, cert, key
        self._clock = clock
        self._lock = threading.Lock()
        self._stamp = self._read_stamp()
        self._checked_s = clock()
        self._pems = self._read()
        self._version = 1

    @property
    def paths(self) -> tuple[str, str, str]:
        """CA, certificate and key."""
        return self._ca, self._cert, self._key

    def newest(self) -> tuple[int, Pems]:
        """The version, which grows with each change, and the content of the files."""
        with self._lock:
            now = self._clock()
            if now - self._checked_s >= CHECK_INTERVAL_S:
                self._checked_s = now
                self._check_files()
            return self._version, self._pems

    def _check_files(self) -> None:
        try:
            stamp = self._read_stamp()
            if stamp == self._stamp:
                return
            # Recorded first, so that files that do not fit are logged once, not at every check.
            self._stamp = stamp
            self._pems = self._read()
        except (OSError, ValueError) as error:
            log.warning("keeping the last good certificates: %s", error)
            return
        self._version += 1
        log.info("new connections use the certificate that is now in %s", self._cert or self._ca)

    def _read_stamp(self) -> _Stamp:
        found = (Path(path).stat() for path in self.paths if path)
        return tuple((stat.st_mtime_ns, stat.st_ino, stat.st_size) for stat in found)

    def _read(self) -> Pems:
        pems = Pems(*(Path(path).read_bytes() if path else None for path in self.paths))
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        if pems.ca is not None:
            context.load_verify_locations(cadata=pems.ca.decode("ascii"))
        if self._cert:
            # With an empty password an encrypted key fails here instead of prompting on a terminal.
            context.load_cert_chain(self._cert, self._key, password="")
        return pems
