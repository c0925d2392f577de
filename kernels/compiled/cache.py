"""Where machine code is kept between runs: only where nobody else can have put it."""

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


def folder() -> str:
    """Beside the sources, else in this user's cache, else in a folder of this user's among the
    temporary ones; "" if nowhere.

    Its name changes with every source of this package: a compiler that watches one file at a time
    would not see that another has changed.
    """
    digest = hashlib.sha256()
    for source in sorted(_HERE.glob("*.py")):
        digest.update(source.read_bytes())
    name = f"jit-{digest.hexdigest()[:16]}"
    for parent in (_beside, _of_user, _temporary):
        # RuntimeError: this user has no home. OSError: not writable, full, or no such place.
        with contextlib.suppress(OSError, RuntimeError):
            found = parent() / name
            found.mkdir(mode=0o700, parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=found):
                _forget_others(found)
                return str(found)
    return ""


def forget(kept: str) -> None:
    """Nothing in it can be used."""
    shutil.rmtree(kept, ignore_errors=True)
    with contextlib.suppress(OSError):
        Path(kept).mkdir(mode=0o700, parents=True)


def _beside() -> Path:
    """Whoever can write here can change the sources as well."""
    return _HERE / "__pycache__"


def _of_user() -> Path:
    home = os.environ.get("XDG_CACHE_HOME")
    return _own((Path(home) if home else Path.home() / ".cache") / "inferfleet", others=0o002)


def _temporary() -> Path:
    """Others can make a folder of any name there, and what is cached is run."""
    return _own(Path(tempfile.gettempdir()) / f"inferfleet-{os.getuid()}", others=0o077)


def _own(place: Path, others: int) -> Path:
    """The folder, made if need be.

    Raises:
        OSError: it is not this user's, or others have rights of `others` to it.
    """
    place.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = place.lstat()
    mine = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()
    if not mine or found.st_mode & others:
        raise PermissionError(f"{place} is not this user's alone")
    return place


def _forget_others(kept: Path) -> None:
    """Code of sources that have changed since is of no use beside them; elsewhere it may be."""
    if kept.is_relative_to(_HERE):
        for old in kept.parent.glob("jit-*"):
            if old != kept:
                shutil.rmtree(old, ignore_errors=True)


def with_cache(kept: str, make: Callable[[bool], T]) -> T:
    """What `make(use the cache)` gives; a cache that fails is emptied once, then done without."""
    for _ in range(2 if kept else 0):
        try:
            return make(True)
        except OSError:  # full, or gone
            break
        except Exception:  # a damaged file: what reading it raises can be anything
            forget(kept)
    return make(False)
