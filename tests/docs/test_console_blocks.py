"""Every console block of README and docs/ runs, or says why it is not run here."""

import os
import re
from pathlib import Path

import pytest

from tests.docs.console import (
    STATUS_MARK,
    Block,
    blocks_of,
    fences_in,
    loose_commands,
    missing_lines,
    run_block,
)

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/**/*.md"))]
BLOCKS = [
    block for page in PAGES for block in blocks_of(str(page.relative_to(ROOT)), page.read_text())
]
RUN = [block for block in BLOCKS if block.skip_reason is None]
MARK = re.compile(r"<!-- (not run here|last exit status)\b.*")


def parameters(blocks: list[Block]) -> list:
    tools = [pytest.mark.tools]
    return [
        pytest.param(block, id=block.name, marks=tools if block.needs_curl else [])
        for block in blocks
    ]


@pytest.mark.e2e
@pytest.mark.model
@pytest.mark.timeout(600)
@pytest.mark.parametrize("block", parameters([b for b in RUN if not b.starts_a_fleet]))
def test_a_block_runs_on_a_fleet(block, fleet_place, fleet_values, tmp_path):
    values = {**fleet_values, "/tmp": str(tmp_path)}
    run_block(block, fleet_place.folder, fleet_place.environment, values)


@pytest.mark.e2e
@pytest.mark.model
@pytest.mark.timeout(600)
@pytest.mark.parametrize("block", parameters([b for b in RUN if b.starts_a_fleet]))
def test_a_block_runs_that_starts_its_own_fleet(block, workplace, tmp_path):
    detached = f"--detach --end-with {os.getpid()} --port 0 --http-port 0"
    run_block(block, workplace.folder, workplace.environment, own_fleet_values(tmp_path, detached))


@pytest.mark.e2e
@pytest.mark.model
@pytest.mark.timeout(600)
def test_the_python_of_the_readme_runs(fleet_place, fleet_values):
    page = (ROOT / "README.md").read_text()
    programs = ["\n".join(lines) for kind, *_, lines in fences_in(page) if kind == "python"]
    assert programs
    for program in programs:
        text = program.replace("127.0.0.1:50051", fleet_values["127.0.0.1:50051"])
        assert "Paris" in fleet_place.run("python", "-c", text)


def own_fleet_values(folder: Path, detached: str) -> dict[str, str]:
    """Placeholders of blocks that start a fleet; the shell finds revisions when it needs them."""
    find = "import json,sys; print({e['engine_id']: e for e in json.load(sys.stdin)['engines']}"
    revisions = {
        name: f"$(inferfleet status --json | python -c \"{find}['{engine}']['model_revision'])\")"
        for name, engine in (("r1", "engine-1"), ("r2", "engine-2"))
    }
    return {"--detach": detached, "/tmp": str(folder), **revisions}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_mark_belongs_to_a_block(page):
    text = page.read_text()
    used = [before for language, _, before, _ in fences_in(text) if language == "console"]
    marks = [line.strip() for line in text.splitlines() if MARK.match(line.strip())]
    assert marks == [before for before in used if before.startswith("<!-- ")]
    for mark in marks:
        assert re.fullmatch(r"<!-- not run here: \S+( \S+){2,} -->", mark) or STATUS_MARK.match(
            mark
        )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_stand_in_console_blocks_alone(page):
    shells = ("sh", "bash", "shell")
    assert [line for kind, line, *_ in fences_in(page.read_text()) if kind in shells] == []
    assert loose_commands(page.read_text()) == []


def test_most_blocks_are_run():
    assert len(RUN) > len(BLOCKS) / 3


PAGE = """\
Text.
<!-- last exit status: 3 -->
```console
$ echo 'one
> two' && \\
    echo three 4
$ exit_3   # a comment
fails 12
```
"""


class TestReader:
    def test_a_command_goes_on_through_quotes_and_backslashes(self):
        (block,) = blocks_of("page", PAGE)
        assert [c.text.splitlines()[-1] for c in block.commands] == [
            "    echo three 4",
            "exit_3   # a comment",
        ]
        assert block.commands[1].shown == ("fails 12",)
        assert block.last_status == 3

    def test_a_block_without_a_command_is_refused(self):
        with pytest.raises(ValueError, match="begins with a command"):
            blocks_of("page", "```console\nls\n```\n")

    def test_a_command_outside_of_a_block_is_found(self):
        text = PAGE + "\n    make chaos\n\n    make-believe is no command\n"
        assert loose_commands(text) == ["make chaos"]

    def test_numbers_and_digests_may_differ_and_words_may_not(self):
        output = "ready in 0.7 s\nrevision 0123abcd4567\n"
        assert missing_lines(("ready in  12.25 s", "revision aaaabbbbcccc"), output) == []
        assert missing_lines(("started in 0.7 s",), output) == ["started in 0.7 s"]


class TestRunner:
    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("$ true\n$ false", "exit status 1 of"),
            ("$ echo here\nthere", "not printed by"),
            ("$ exit 4", "ended early"),
        ],
    )
    def test_a_block_that_does_not_do_what_it_shows_fails(self, tmp_path, text, message):
        (block,) = blocks_of("page", f"```console\n{text}\n```\n")
        with pytest.raises(AssertionError, match=message):
            run_block(block, tmp_path, os.environ, {})

    def test_placeholders_are_replaced_as_whole_words(self, tmp_path):
        (block,) = blocks_of("page", "```console\n$ echo PID MYPID\n7 MYPID\n```\n")
        run_block(block, tmp_path, os.environ, {"PID": "7"})
