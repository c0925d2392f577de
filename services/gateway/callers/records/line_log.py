"""JSON lines into a file that rotates, or to stdout, written by a thread of their own.

A sink that is slow or broken costs records, which are counted, and never a request's time.
"""

import logging
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import msgspec

log = logging.getLogger(__name__)

STDOUT = "-"
QUEUED = 10_000
BATCH = 256
FLUSH_S = 2.0
WARN_EVERY_S = 30.0


class Sink(Protocol):
    """Takes records; never blocks."""

    def put(self, record: msgspec.Struct) -> None: ...


class LineLog:
    """Owned by the gateway's loop; `put` may be called from any thread.

    Args:
        path: of the file, "-" for stdout.
        max_bytes: a file that has grown beyond is renamed to `<path>.1`, that one to `<path>.2` …
        kept: files beside the current one.
        lost: called with a number of records that could not be written.
    """

    def __init__(
        self, path: str, *, max_bytes: int, kept: int, lost: Callable[[int], None]
    ) -> None:
        self._path = path
        self._max_bytes = max_bytes
        self._kept = kept
        self._lost = lost
        self._queue: queue.Queue[msgspec.Struct | None] = queue.Queue(QUEUED)
        self._encoder = msgspec.json.Encoder()
        self._warned_s = -WARN_EVERY_S
        self._file: int | None = None
        self._torn = False
        self._thread = threading.Thread(target=self._write_all, name="records", daemon=True)

    def start(self) -> None:
        """Open the file and begin.

        Raises:
            OSError: it cannot be written.
        """
        self._file = self._open()
        self._thread.start()

    def put(self, record: msgspec.Struct) -> None:
        """Hand a record over; with a full queue it is lost."""
        try:
            self._queue.put_nowait(record)
        except queue.Full:
            self._lose(1, "the sink is too slow")

    def close(self) -> None:
        """Write what is queued, within two seconds; idempotent."""
        if not self._thread.is_alive():
            return
        deadline = time.monotonic() + FLUSH_S
        try:
            self._queue.put(None, timeout=FLUSH_S)
        except queue.Full:
            pass
        else:
            self._thread.join(max(deadline - time.monotonic(), 0))
        if self._thread.is_alive():
            self._lose(self._queue.qsize(), "the sink did not take them before the end")

    def _write_all(self) -> None:
        ended = False
        while not ended:
            batch = [self._queue.get()]
            while len(batch) < BATCH and not self._queue.empty():
                batch.append(self._queue.get_nowait())
            ended = None in batch
            records = [record for record in batch if record is not None]
            try:
                if records:
                    self._write(records)
            except OSError as error:
                self._lose(len(records), str(error))
        if self._file is not None:
            os.close(self._file)

    def _write(self, records: Sequence[msgspec.Struct]) -> None:
        lines = b"".join(self._encoder.encode(record) + b"\n" for record in records)
        if self._path == STDOUT:
            sys.stdout.buffer.write(lines)
            sys.stdout.buffer.flush()
            return
        if self._file is None or self._moved(self._file):
            self._reopen()
        size = os.fstat(self._opened).st_size
        if size and size + len(lines) > self._max_bytes:
            self._rotate()
        # What a full disk took half of ends here, so that the next record has a line of its own.
        rest = memoryview(b"\n" + lines if self._torn else lines)
        self._torn = True
        while rest:
            rest = rest[os.write(self._opened, rest) :]
        self._torn = False

    @property
    def _opened(self) -> int:
        assert self._file is not None
        return self._file

    def _moved(self, descriptor: int) -> bool:
        """Whether somebody else rotated it, as logrotate does."""
        try:
            there = os.stat(self._path)
        except FileNotFoundError:
            return True
        return there.st_ino != os.fstat(descriptor).st_ino

    def _reopen(self) -> None:
        old, self._file = self._file, None
        if old is not None:
            os.close(old)
        self._file, self._torn = self._open(), False

    def _rotate(self) -> None:
        path = Path(self._path)
        for number in range(self._kept, 0, -1):
            source = path.with_name(f"{path.name}.{number - 1}") if number > 1 else path
            if source.exists():
                source.replace(path.with_name(f"{path.name}.{number}"))
        if not self._kept:
            path.unlink(missing_ok=True)
        self._reopen()

    def _open(self) -> int | None:
        if self._path == STDOUT:
            return None
        # Whoever may read it learns who asked for what, so not everybody may.
        return os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o640)

    def _lose(self, number: int, why: str) -> None:
        if not number:
            return
        self._lost(number)
        now = time.monotonic()
        if now - self._warned_s >= WARN_EVERY_S:
            self._warned_s = now
            log.warning("%d records for %s are lost: %s", number, self._path, why)
