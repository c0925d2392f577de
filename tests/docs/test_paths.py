"""Every file and folder that README, CONTRIBUTING and docs/ name exists."""

import ast
import re
import subprocess
from fnmatch import fnmatch
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/**/*.md"))]
TRACKED = subprocess.run(
    ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
    cwd=ROOT,
    capture_output=True,
    text=True,
    check=True,
).stdout.splitlines()
FILES = {"/" + name for name in TRACKED if (ROOT / name).is_file()}
FOLDERS = {
    "/" + str(parent) + "/" for name in FILES for parent in Path(name[1:]).parents if parent.name
}
NAMED = re.compile(r"`([\w./*<>{},-]+)`")
SOURCE = re.compile(r"\.(py|proto|lua|toml|yaml|yml|lock|sh|md|tpl|pyi)$")
# Files of a running fleet, of a model's folder or of a user, which no checkout holds.
ELSEWHERE = re.compile(
    r"^(\.inferfleet|\.venv|models|logs|ready|~|/)|^(build|dist)/"
    r"|^(config|tokenizer|fleet|model\.safetensors\.index)\.json$"
)


def named_paths(text: str) -> set[str]:
    """Words in backticks that look like a path: a source file, or a folder with a final slash."""
    found = set()
    for word in NAMED.findall(text):
        path = word.split("::")[0]
        is_path = SOURCE.search(path) or re.fullmatch(r"[\w.-]+(/[\w.-]+)*/", path)
        if is_path and not re.search(r"[<>*{},]", path) and not ELSEWHERE.match(path):
            found.add(path)
    return found


def exists(path: str) -> bool:
    """Whether a file or folder has this path, or ends with it: `scheduling/scheduler.py`."""
    everything = FOLDERS if path.endswith("/") else FILES
    return any(one.endswith("/" + path) for one in everything)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_named_path_exists(page):
    assert sorted(path for path in named_paths(page.read_text()) if not exists(path)) == []


def test_a_path_that_does_not_exist_is_found():
    text = "`services/engine/no_such.py`, `no_such/`, `services/engine/`, `scheduler.py`, `a.json`"
    assert {path for path in named_paths(text) if not exists(path)} == {
        "services/engine/no_such.py",
        "no_such/",
    }


HEADS = sorted(
    path
    for name in ("services", "kernels", "inferfleet_cli")
    for path in (ROOT / name).rglob("__init__.py")
)


@pytest.mark.parametrize("head", HEADS, ids=lambda head: str(head.parent.relative_to(ROOT)))
def test_every_file_that_a_package_head_names_exists(head):
    docstring = ast.get_docstring(ast.parse(head.read_text())) or ""
    named = set(re.findall(r"(?<![\w*.])\w[\w/]*\.(?:py|lua)\b", docstring))
    missing = [n for n in named if not (ROOT / n).is_file() and not any(head.parent.rglob(n))]
    assert sorted(missing) == []


# One file per operation or policy there, named after it: the folder's listing is its map.
SELF_EXPLAINING = re.compile(
    r"^(kernels/(reference|torch|triton)|services/balancer/routing/policies)"
)


@pytest.mark.parametrize("head", HEADS, ids=lambda head: str(head.parent.relative_to(ROOT)))
def test_a_package_head_names_each_of_its_files(head):
    folder = head.parent
    if SELF_EXPLAINING.match(str(folder.relative_to(ROOT))):
        return
    docstring = ast.get_docstring(ast.parse(head.read_text())) or ""
    files = {path.name for path in folder.glob("*.py") if not path.name.startswith("__")}
    named = set(re.findall(r"\w[\w*]*\.py\b", docstring))
    unnamed = {f for f in files if not any(fnmatch(f, pattern) for pattern in named)}
    assert sorted(unnamed) == []
