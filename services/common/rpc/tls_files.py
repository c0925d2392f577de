"""Certificates in files that are replaced while a service runs (cert-manager, a renewal job)."""

import logging
import ssl
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

log = logging.getLogger(__name__)

LOOK_AGAIN_S = 1.0
_Stamp = tuple[tuple[int, int, int], ...]


@dataclass(frozen=True)
class Pems:
    """What the files hold; None for one that was not named."""

    ca: bytes | None
    cert: bytes | None
    key: bytes | None


class TlsFiles:
    """The newest files that fit together; may be used by any thread.

    Files that are half replaced are left alone, with a warning, until they fit: connections are
    then still made with the last good ones.

    Args:
        ca, cert, key: paths; empty for none. cert and key come together.

    Raises:
        OSError: one cannot be read.
        ValueError: they are no PEM, or the key is not the certificate's.
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
        self._stamp = self._stamped()
        self._looked_s = clock()
        self._pems = self._read()
        self._version = 1

    @property
    def paths(self) -> tuple[str, str, str]:
        """CA, certificate and key."""
        return self._ca, self._cert, self._key

    def newest(self) -> tuple[int, Pems]:
        """A version, counted up with each change, and what the files held then."""
        with self._lock:
            now = self._clock()
            if now - self._looked_s >= LOOK_AGAIN_S:
                self._looked_s = now
                self._look()
            return self._version, self._pems

    def _look(self) -> None:
        try:
            stamp = self._stamped()
            if stamp == self._stamp:
                return
            # Written down first: files that do not fit are told of once, not with every look.
            self._stamp = stamp
            self._pems = self._read()
        except (OSError, ValueError) as error:
            log.warning("keeping the last good certificates: %s", error)
            return
        self._version += 1
        log.info("new connections use the certificate that is now in %s", self._cert or self._ca)

    def _stamped(self) -> _Stamp:
        found = (Path(path).stat() for path in self.paths if path)
        return tuple((stat.st_mtime_ns, stat.st_ino, stat.st_size) for stat in found)

    def _read(self) -> Pems:
        pems = Pems(*(Path(path).read_bytes() if path else None for path in self.paths))
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        if pems.ca is not None:
            context.load_verify_locations(cadata=pems.ca.decode("ascii"))
        if self._cert:
            # The empty password: an encrypted key must fail here, not ask a terminal.
            context.load_cert_chain(self._cert, self._key, password="")
        return pems
