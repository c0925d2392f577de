"""Where compiled code is cached between runs: only in folders that no other user can write."""

import contextlib
import hashlib
import os
import shutil
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

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
    for parent in (_beside_sources, _user_cache, _temporary):
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


def _user_cache() -> Path:
    home = os.environ.get("XDG_CACHE_HOME")
    return _own((Path(home) if home else Path.home() / ".cache") / "inferfleet", others=0o002)


def _temporary() -> Path:
    """Other users can make a folder of any name there, and cached code is executed."""
    return _own(Path(tempfile.gettempdir()) / f"inferfleet-{os.getuid()}", others=0o077)


def _own(place: Path, others: int) -> Path:
    """Make the folder if it is missing, and check that it belongs to this user alone.

    Args:
        others: permission bits that other users must not have.

    Raises:
        OSError: it belongs to another user, or other users have one of these permissions.
    """
    place.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = place.lstat()
    mine = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()
    if not mine or found.st_mode & others:
        raise PermissionError(f"{place}: not owned by this user, or open to other users")
    return place


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
