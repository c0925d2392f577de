"""Rules of the repository that no linter checks: sizes, names, words, links, locks."""

import re
import subprocess
import tokenize
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


SOURCES = ("services", "kernels", "inferfleet", "inferfleet_cli")
MAX_MEDIAN_LINES = 120


def sources(*folders: str) -> list[Path]:
    """Hand-written Python files of some top-level folders."""
    return [
        path
        for path in FILES
        if path.suffix == ".py"
        and path.relative_to(ROOT).parts[0] in folders
        and not MADE_BY_TOOLS.search(path.name)
    ]


def test_the_median_module_fits_one_screen_or_two():
    lengths = sorted(len(path.read_text().splitlines()) for path in sources(*SOURCES))
    assert lengths[len(lengths) // 2] <= MAX_MEDIAN_LINES


# Names that were replaced by the terms of the field.
# Where an old name is an ordinary word as well, only the folders that misused it are checked.
ALL = (*SOURCES, "benchmarks", "scripts")
RENAMED = {
    ALL: (
        "Rooms Door Admitted Books Asked asked_of Exchange Grant Link told _told"
        " _told_to_end Taker seats seat ticket Ticket lane Lane BackingError backing EngineServer"
        " FrontMetrics _take _look _tell"
    ),
    ("services/gateway", "services/balancer"): "said _said saw greeted news places",
    ("kernels", "services/engine/compute"): "turns levels middle",
}

FORMER_NAMES = {"services/balancer/engines/engine_view.py": {"Asked"}}
"""Names that stay importable, because policies of users may import them."""


def test_no_replaced_name_is_left():
    left = {}
    for folders, names in RENAMED.items():
        old = set(names.split())
        for path in sources(*(folder.split("/")[0] for folder in folders)):
            if any(name_of(path).startswith(f"{folder}/") for folder in folders):
                with tokenize.open(path) as file:
                    tokens = tokenize.generate_tokens(file.readline)
                    found = {t.string for t in tokens if t.type == tokenize.NAME} & old
                found -= FORMER_NAMES.get(name_of(path), set())
                if found:
                    left[name_of(path)] = sorted(found)
    assert not left


# Words that hide who does what: verbs of people for machines, and pronouns without a referent.
PRIVATE_WORDS = re.compile(
    r"(?<![A-Za-z])(asked|told|rooms|nobody|whatever)(?![A-Za-z])", re.IGNORECASE
)
WORDS_AT_FIRST = 812
"""Matches in the same kinds of file, outside tests, at revision 9b397ae."""


def test_private_words_have_fallen_by_nine_tenths():
    counts = {}
    for path in FILES:
        name = name_of(path)
        if (
            path.suffix in {".py", ".md", ".proto", ".toml", ".yaml", ".yml", ".tpl", ".sh", ".lua"}
            and not name.startswith(("tests/", "CHANGELOG", "THIRD_PARTY"))
            and not re.search(r"_pb2|/data/|results/", name)
        ):
            counts[name] = len(PRIVATE_WORDS.findall(path.read_text()))
    assert sum(counts.values()) <= WORDS_AT_FIRST // 10, {n: c for n, c in counts.items() if c}


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
