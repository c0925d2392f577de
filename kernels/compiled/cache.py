"""Where compiled code is cached between runs: only in folders that no other user can write."""

import contextlib
import hashlib
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from kernels.kept_files import temporary, user_cache

T = TypeVar("T")
_HERE = Path(__file__).parent


def folder() -> str | None:
    """Find or make the cache folder.

    It is beside the sources, else in the user's cache folder, else in the temporary folder. Its
    name is a digest of all sources of this package: numba's own check covers only the file of the
    compiled function, not those that it calls.

    Returns:
        The folder's path; None if no folder can be used.
    """
    digest = hashlib.sha256()
    for source in sorted(_HERE.glob("*.py")):
        digest.update(source.read_bytes())
    name = f"jit-{digest.hexdigest()[:16]}"
    for parent in (_beside_sources, user_cache, temporary):
        # RuntimeError: this user has no home. OSError: not writable, full, or no such place.
        with contextlib.suppress(OSError, RuntimeError):
            found = parent() / name
            found.mkdir(mode=0o700, parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=found):
                _delete_outdated(found)
                return str(found)
    return None


def clear(path: str) -> None:
    """Delete the contents of a cache folder."""
    shutil.rmtree(path, ignore_errors=True)
    with contextlib.suppress(OSError):
        Path(path).mkdir(mode=0o700, parents=True)


def _beside_sources() -> Path:
    """A user who can write here can change the sources as well."""
    return _HERE / "__pycache__"


def _delete_outdated(current: Path) -> None:
    """Delete code of earlier sources, if the folder is beside these sources.

    Elsewhere another checkout may still use it.
    """
    if current.is_relative_to(_HERE):
        for old in current.parent.glob("jit-*"):
            if old != current:
                shutil.rmtree(old, ignore_errors=True)


def with_cache(path: str | None, make: Callable[[bool], T]) -> T:
    """Return `make(True)`, or `make(False)` where the cache cannot be used.

    Args:
        path: the cache folder. If reading it fails, it is cleared once and tried again.
        make: compiles; the argument says whether to use the cache.
    """
    if path is None:
        return make(False)
    for _ in range(2):
        try:
            return make(True)
        except OSError:  # the disk is full, or the folder is gone
            break
        except Exception:  # a damaged file can raise anything
            clear(path)
    return make(False)
