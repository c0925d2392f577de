"""Writes records as JSON lines to a rotating file or to stdout, in a thread of its own.

A slow or broken sink loses records, which are counted; it never delays a request.
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
    """Accepts records; never blocks."""

    def put(self, record: msgspec.Struct) -> None:
        """Queue a record."""


class LineLog:
    """Owned by the gateway's loop; `put` may be called from any thread.

    Args:
        path: of the file; "-" is stdout.
        max_bytes: a larger file is renamed to `<path>.1`, the one before to `<path>.2`, and so on.
        kept: rotated files beside the current one.
        on_loss: called with the number of records that could not be written, from any thread.
    """

    def __init__(
        self, path: str, *, max_bytes: int, kept: int, on_loss: Callable[[int], None]
    ) -> None:
        self._path = path
        self._max_bytes = max_bytes
        self._kept = kept
        self._on_loss = on_loss
        self._queue: queue.Queue[msgspec.Struct | None] = queue.Queue(QUEUED)
        self._encoder = msgspec.json.Encoder()
        self._warned_s = -WARN_EVERY_S
        self._file: int | None = None
        self._partial_line = False
        self._thread = threading.Thread(target=self._write_all, name="records", daemon=True)

    def start(self) -> None:
        """Open the file and start the thread.

        Raises:
            OSError: the file cannot be written.
        """
        self._file = self._open()
        self._thread.start()

    def put(self, record: msgspec.Struct) -> None:
        """Queue a record; it is lost if the queue is full."""
        try:
            self._queue.put_nowait(record)
        except queue.Full:
            self._lose(1, "the sink is too slow")

    def close(self) -> None:
        """Write queued records, for at most two seconds; idempotent."""
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
            self._lose(self._queue.qsize(), "the sink did not accept them before the shutdown")

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
        if self._file is None or self._was_moved(self._file):
            self._reopen()
        size = os.fstat(self._descriptor).st_size
        if size and size + len(lines) > self._max_bytes:
            self._rotate()
        # A full disk may have taken a part of a line: end it, so that each record has its own.
        rest = memoryview(b"\n" + lines if self._partial_line else lines)
        self._partial_line = True
        while rest:
            rest = rest[os.write(self._descriptor, rest) :]
        self._partial_line = False

    @property
    def _descriptor(self) -> int:
        assert self._file is not None
        return self._file

    def _was_moved(self, descriptor: int) -> bool:
        """Whether another program has moved the file, as logrotate does."""
        try:
            current = os.stat(self._path)
        except FileNotFoundError:
            return True
        return current.st_ino != os.fstat(descriptor).st_ino

    def _reopen(self) -> None:
        old, self._file = self._file, None
        if old is not None:
            os.close(old)
        self._file, self._partial_line = self._open(), False

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
        # The file shows who requested what, so it is not readable for everyone.
        return os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o640)

    def _lose(self, number: int, why: str) -> None:
        if not number:
            return
        self._on_loss(number)
        now = time.monotonic()
        if now - self._warned_s >= WARN_EVERY_S:
            self._warned_s = now
            log.warning("lost %d records for %s: %s", number, self._path, why)
