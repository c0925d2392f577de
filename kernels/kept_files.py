"""Folders for what one process leaves to the next: only such that no other user can write."""

import contextlib
import os
import stat
import tempfile
from pathlib import Path


def folder(name: str) -> Path | None:
    """Find or make a folder of this name in the user's cache folder, for large files.

    Returns:
        None if it cannot be used. The temporary folder is no substitute: it may be in memory.
    """
    # RuntimeError: this user has no home. OSError: not writable, full, or no such place.
    with contextlib.suppress(OSError, RuntimeError):
        found = user_cache() / name
        found.mkdir(mode=0o700, exist_ok=True)
        with tempfile.TemporaryFile(dir=found):
            return found
    return None


def user_cache() -> Path:
    """The user's cache folder.

    Raises:
        OSError: it cannot be made, or other users can write it.
        RuntimeError: this user has no home.
    """
    home = os.environ.get("XDG_CACHE_HOME")
    return _own((Path(home) if home else Path.home() / ".cache") / "inferfleet", others=0o002)


def temporary() -> Path:
    """A folder in the temporary one. Other users can make a folder of any name there.

    Raises:
        OSError: it belongs to another user, or cannot be made.
    """
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
