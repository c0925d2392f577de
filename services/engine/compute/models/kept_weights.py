"""Packed weights that a start leaves for the next ones, which read them instead of packing anew.

A file has the length of its head (8 bytes), the head (JSON: the entries), and the tensors. Its name
is a digest of what the tensors are made of: the model's files, the kernel set, and all code that
decodes and packs. A new file replaces nothing before it is complete and on disk.
"""

import contextlib
import hashlib
import io
import json
import logging
import math
import os
import shutil
import threading
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kernels import kept_files
from kernels.whole_rounds import PackedWeight
from services.engine.contract.model_config import ModelConfig

log = logging.getLogger(__name__)

LEAST_BYTES = 32 << 20
"""Smaller models are packed in a moment."""
MOST_BYTES = 4 << 30
"""Of all files together; the ones used longest ago are deleted."""
_ALIGN = 64
_STALE_S = 120.0
"""An unfinished file that nobody wrote to for so long belongs to a process that ended."""
_HERE = Path(__file__).parent
_SOURCES = (_HERE, _HERE.parent / "loader", Path(kept_files.__file__).parent / "compiled")


class KeptWeights:
    """The file of one model and kernel set. One that exists is read at once, on a thread.

    Args:
        path: where it is or will be; None keeps nothing.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._entries: dict[str, Any] = {}
        self._data = torch.empty(0, dtype=torch.uint8)
        self._new: dict[str, Tensor] = {}
        self._reading: threading.Thread | None = None
        self._error: OSError | None = None
        if path is not None:
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                self._begin_reading(path)

    @property
    def complete(self) -> bool:
        """Whether the file holds the model."""
        return bool(self._entries)

    def load(self, name: str) -> PackedWeight:
        """The packed weight of this name, of a file that is `complete`.

        Raises:
            OSError: the file cannot be read, or is shorter than its head says.
        """
        panels = self._load(f"{name}.panels")
        scales = f"{name}.scales"
        return PackedWeight(panels, self._load(scales) if scales in self._entries else None)

    def add(self, name: str, packed: PackedWeight) -> PackedWeight:
        """Keep a packed weight for `save`; returns it."""
        if self._path is not None:
            self._new[f"{name}.panels"] = packed.panels
            if packed.scales is not None:
                self._new[f"{name}.scales"] = packed.scales
        return packed

    def save(self) -> threading.Thread | None:
        """Write what was added, on a thread; None if that is nothing.

        An error is logged and changes nothing.
        """
        new, self._new = self._new, {}
        path = self._path
        size = sum(tensor.nbytes for tensor in new.values())
        if path is None or not LEAST_BYTES <= size <= MOST_BYTES:
            return None
        thread = threading.Thread(
            target=_write, args=(path, new, size), name="keep-weights", daemon=True
        )
        thread.start()
        return thread

    def _begin_reading(self, path: Path) -> None:
        from kernels.compiled.pages import zeros  # only compiled rounds keep weights

        with contextlib.ExitStack() as stack:
            file = stack.enter_context(io.FileIO(path))
            head_bytes = int.from_bytes(file.read(8), "little")
            if head_bytes > 1 << 24:
                raise ValueError("no head")
            head = json.loads(file.read(head_bytes))
            size, entries = head["bytes"], head["entries"]
            if os.fstat(file.fileno()).st_size != 8 + head_bytes + size:
                raise ValueError("cut short")
            with contextlib.suppress(OSError):  # a folder that cannot be written can be read
                os.utime(path)  # it is in use: others are deleted first
            self._data, self._entries = zeros((size,), torch.uint8), entries
            stack.pop_all()
        self._reading = threading.Thread(target=self._read, args=(file,), name="read-weights")
        self._reading.start()

    def _read(self, file: io.FileIO) -> None:
        wanted = self._data.numpy().data
        try:
            with file:
                while wanted:
                    count = file.readinto(wanted)
                    if not count:
                        raise OSError(f"{self._path} is cut short")
                    wanted = wanted[count:]
        except OSError as error:
            self._error = error

    def _load(self, name: str) -> Tensor:
        if self._reading is not None:
            self._reading.join()
        if self._error is not None:
            raise self._error
        shape, kind, at = self._entries[name]
        dtype: torch.dtype = getattr(torch, kind)
        size = math.prod(shape) * dtype.itemsize
        return self._data[at : at + size].view(dtype).view(tuple(shape))


def kept_peak(path: Path | None, key: str) -> int | None:
    """The bytes that an earlier start of the same weights stored under `key`; None for none."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        found = json.loads(_peaks(path).read_text()).get(key) if path else None
        return found if isinstance(found, int) else None
    return None


def keep_peak(path: Path | None, key: str, peak: int) -> None:
    """Store bytes under `key` for later starts; an error changes nothing."""
    if path is None:
        return
    with contextlib.suppress(OSError):
        scratch = _peaks(path).with_suffix(f".{os.getpid()}")
        scratch.write_text(json.dumps({key: peak}))
        scratch.replace(_peaks(path))


def _peaks(path: Path) -> Path:
    return path.with_suffix(".peak")


def path_of(revision: str, config: ModelConfig, kernels: str) -> Path | None:
    """Where the packed weights of a model are kept; None where no folder can be used.

    The panels' layout follows the processor, and several kinds may share the folder.
    """
    from kernels.compiled.machine import machine  # numba: only compiled rounds come here

    folder = kept_files.folder("weights")
    if folder is None:
        return None
    made_of = (revision, config, kernels, torch.__version__, machine())
    digest = hashlib.sha256(repr(made_of).encode())
    with contextlib.suppress(ImportError):
        digest.update(version("gguf").encode())
    for place in _SOURCES:
        for source in sorted(place.rglob("*.py")):
            digest.update(source.read_bytes())
    return folder / f"{digest.hexdigest()[:32]}.weights"


def _write(path: Path, tensors: dict[str, Tensor], size: int) -> None:
    part = path.with_suffix(".part")
    try:
        if shutil.disk_usage(path.parent).free < 2 * size:
            log.info("packed weights are not kept: the disk of %s is nearly full", path.parent)
            return
        _delete_oldest(path.parent, MOST_BYTES - size)
        descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return  # another engine of the model writes it
    except OSError as error:
        log.info("packed weights are not kept: %s", error)
        return
    try:
        with os.fdopen(descriptor, "wb") as file:
            _write_tensors(file, tensors)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except OSError as error:
        log.info("packed weights are not kept: %s", error)
        part.unlink(missing_ok=True)


def _write_tensors(file: Any, tensors: dict[str, Tensor]) -> None:
    entries, at = {}, 0
    for name, tensor in tensors.items():
        entries[name] = (list(tensor.shape), str(tensor.dtype).removeprefix("torch."), at)
        at += -(-tensor.nbytes // _ALIGN) * _ALIGN
    head = json.dumps({"entries": entries, "bytes": at}).encode()
    head += b" " * (-(len(head) + 8) % _ALIGN)
    file.write(len(head).to_bytes(8, "little") + head)
    for tensor in tensors.values():
        file.write(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
        file.write(bytes(-tensor.nbytes % _ALIGN))


def _delete_oldest(folder: Path, most_bytes: int) -> None:
    """Delete the files used longest ago, until the others take `most_bytes` at most."""
    now = time.time()
    unfinished = [file for file in folder.iterdir() if file.suffix not in (".weights", ".peak")]
    alone = [file for file in folder.glob("*.peak") if not file.with_suffix(".weights").exists()]
    for file in (*unfinished, *alone):
        with contextlib.suppress(OSError):
            if now - file.stat().st_mtime > _STALE_S:
                file.unlink()
    found = []
    for file in folder.glob("*.weights"):
        with contextlib.suppress(OSError):
            found.append((file.stat().st_mtime, file.stat().st_size, file))
    total = sum(size for _, size, _ in found)
    for _, size, file in sorted(found):
        if total <= most_bytes:
            return
        file.unlink(missing_ok=True)
        _peaks(file).unlink(missing_ok=True)
        total -= size
