"""Code is cached where no other user can write, and a broken cache stops no engine."""

import os
from pathlib import Path

import pytest

from kernels.compiled import cache


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the sources is read-only; home and temporary folder are below the path."""

    def refuse() -> Path:
        raise PermissionError("read-only")

    monkeypatch.setattr(cache, "_beside_sources", refuse)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    return tmp_path


def test_the_user_s_cache_folder_is_second(places: Path) -> None:
    kept = Path(cache.folder())
    assert kept.parent == places / "home" / ".cache" / "inferfleet"
    assert kept.stat().st_mode & 0o077 == 0
    assert cache.folder() == str(kept)


def test_without_a_home_the_folder_is_a_temporary_one_of_this_user_only(
    places: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", homeless)
    own = places / "tmp" / f"inferfleet-{os.getuid()}"
    assert Path(cache.folder()).parent == own
    own.chmod(0o777)
    assert cache.folder() is None
    own.chmod(0o700)
    own.rename(places / "elsewhere")
    own.symlink_to(places / "elsewhere")
    assert cache.folder() is None
    monkeypatch.setattr("tempfile.tempdir", str(places / "nowhere" / "file"))
    (places / "nowhere").write_text("no folder")
    assert cache.folder() is None


def test_a_folder_that_others_can_write_to_is_not_used(places: Path) -> None:
    shared = places / "home" / ".cache" / "inferfleet"
    shared.mkdir(parents=True)
    shared.chmod(0o777)
    assert Path(cache.folder()).parent.parent == places / "tmp"


@pytest.mark.parametrize(
    ("fault", "tries", "emptied"),
    [(EOFError("damaged"), [True, True], True), (OSError(28, "full"), [True, False], False)],
)
def test_a_damaged_cache_is_cleared_and_a_full_disk_is_ignored(
    fault: Exception, tries: list[bool], emptied: bool, tmp_path: Path
) -> None:
    kept = tmp_path / "jit-1"
    kept.mkdir()
    (kept / "step.nbi").write_bytes(b"")
    seen: list[bool] = []

    def make(keep: bool) -> str:
        seen.append(keep)
        if keep and (kept / "step.nbi").exists():
            raise fault
        return "made"

    assert cache.with_cache(str(kept), make) == "made"
    assert seen == tries
    assert (kept / "step.nbi").exists() is not emptied
    assert kept.is_dir()


def test_an_error_of_the_kernel_itself_is_raised() -> None:
    def make(keep: bool) -> str:
        raise TypeError(f"a mistake, cache {keep}")

    with pytest.raises(TypeError, match="cache False"):
        cache.with_cache(None, make)
