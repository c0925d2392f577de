"""Rules of the repository that no linter knows."""

import re
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
MAX_LINES = 400
MADE_BY_TOOLS = re.compile(r"_pb2(_grpc)?\.pyi?$|\.lock$|package-lock\.json$|^LICENSE$")
PROSE_AND_CODE = {".py", ".md", ".proto", ".toml", ".yaml", ".yml", ".tpl", ".sh", ".js", ".go", ""}
# A checkout must build behind any mirror, and must not name a machine.
# (Each pattern is spelt so that it does not find itself.)
LEAKS = re.compile(
    r"pyp[i]\.org|pythonhoste[d]|npmj[s]\.|download\.pytorc[h]|/opt/(wheel[s]|pyp[i])"
    r"|(?<![\w.])/wor[k]/|\.\./share[d]|(?<![\w\x22])/roo[t]/|/hom[e]/(?!app\b)[a-z]"
)
UNFINISHED = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b")
LINK = re.compile(r"\[[^\]\n]*\]\(([^)\s]+)\)")


def tracked() -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    return [ROOT / name for name in listed.split("\0") if name and (ROOT / name).is_file()]


FILES = tracked()
READABLE = [path for path in FILES if path.suffix in PROSE_AND_CODE]
PAGES = [path for path in FILES if path.suffix == ".md"]


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_no_file_is_longer_than_a_reader_can_hold():
    long = {}
    for path in READABLE:
        if not MADE_BY_TOOLS.search(name_of(path)):
            lines = len(path.read_text().splitlines())
            if lines > MAX_LINES:
                long[name_of(path)] = lines
    assert not long


def test_the_median_module_fits_one_screen_or_two():
    sources = [p for p in FILES if p.suffix == ".py" and not MADE_BY_TOOLS.search(p.name)]
    kept = [p for p in sources if p.relative_to(ROOT).parts[0] in ("services", "kernels")]
    lengths = sorted(len(path.read_text().splitlines()) for path in kept)
    assert lengths[len(lengths) // 2] <= 130


@pytest.mark.parametrize("pattern", [LEAKS, UNFINISHED], ids=["leaks", "unfinished"])
def test_nothing_names_a_machine_a_registry_or_unfinished_work(pattern):
    found = [
        f"{name_of(path)}:{number}: {line.strip()[:80]}"
        for path in READABLE
        if path != Path(__file__).resolve() and name_of(path) != "LICENSE"
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if pattern.search(line)
    ]
    assert not found


def test_the_kernels_package_is_ours():
    import kernels

    assert kernels.__file__ is not None
    assert Path(kernels.__file__).resolve().parent == ROOT / "kernels"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_of_a_page_lead_somewhere(page):
    dead = []
    for target in LINK.findall(page.read_text()):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        there = (page.parent / path) if path else page
        if not there.exists() or (anchor and anchor not in anchors(there)):
            dead.append(target)
    assert not dead


def anchors(page: Path) -> set[str]:
    heads = re.findall(r"^#+ +(.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


def test_every_target_that_a_page_names_exists():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {
        (name_of(page), target)
        for page in PAGES
        for target in re.findall(r"(?:`|^\s*\$? ?)make ([a-z-]+)", page.read_text(), re.MULTILINE)
    }
    assert not {(page, target) for page, target in named if target not in targets}


def test_every_decision_is_in_the_index():
    folder = ROOT / "docs" / "adr"
    records = [path for path in PAGES if path.parent == folder and path.name != "README.md"]
    index = (folder / "README.md").read_text()
    assert [path.name for path in records if path.name not in index] == []
    assert [p.name for p in records if len(p.read_text().splitlines()) > 60] == []


def test_the_locks_pin_the_triton_that_torchs_cuda_build_wants():
    lock = (ROOT / "requirements" / "cuda.lock").read_text()
    cpu = (ROOT / "requirements" / "cpu.lock").read_text()
    assert "\ntriton==3.7.1 " in lock
    assert "\ntriton==3.7.1 " in cpu
    assert "\ntorch==2.13.0 " in lock
    assert not re.search(r"^(torch|nvidia-\S+)==", cpu, re.MULTILINE)


@pytest.mark.parametrize("name", ["cpu", "cuda", "dev", "model"])
def test_every_locked_package_has_its_digests(name):
    text = (ROOT / "requirements" / f"{name}.lock").read_text()
    entries = re.split(r"\n(?=[a-z])", "\n" + text.split("fetch-mb:")[1].split("\n", 1)[1])
    bare = [entry.split("==")[0] for entry in entries if entry.strip() and "sha256:" not in entry]
    assert bare == []
    assert re.search(r"^# fetch-mb: [1-9]\d*$", text, re.MULTILINE)


def test_the_locks_hold_every_dependency_of_the_project():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    groups = [project["dependencies"], *project["optional-dependencies"].values()]
    wanted = [line for group in groups for line in group]
    names = {re.split(r"[\[<>=!~; ]", line)[0].lower().replace("_", "-") for line in wanted}
    locks = "".join((ROOT / "requirements" / f"{n}.lock").read_text() for n in ("cuda", "dev"))
    locked = set(re.findall(r"^([a-z0-9.-]+)==", locks, re.MULTILINE))
    assert names - locked - {"inferfleet"} == set(), "run: make lock"
