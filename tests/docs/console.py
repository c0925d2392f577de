"""Reads the `console` blocks of the pages and runs them as a reader would type them.

A block is a list of commands. A command begins with `$ ` and continues while a quote is open or a
line ends with a backslash. The lines after it are the output that the page shows. An HTML comment
on the line before a block changes how the test treats the block:

    <!-- not run here: REASON -->    the block needs something that a test does not have
    <!-- last exit status: N -->     the last command shows an error and exits with N
"""

import re
import shlex
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

FENCE = re.compile(r"^```(\w*)$")
LOOSE_COMMAND = re.compile(r"^ {4,}(\$ |(make|python3?|inferfleet|curl|helm|docker|kubectl) )")
SKIP_MARK = re.compile(r"^<!-- not run here: (\S.*) -->$")
STATUS_MARK = re.compile(r"^<!-- last exit status: (\d+) -->$")
TIMEOUT_S = 540.0
"""For one block, on a machine that runs other tests beside it; a quiet one needs a tenth."""
RECORD = "\x1e"
"""Separates the outputs of the commands of one block."""
VARIES = re.compile(r"\b[0-9a-f]{8,}\b|\d+(\.\d+)?")
"""Digests and numbers: they differ from run to run."""


@dataclass(frozen=True)
class Command:
    text: str
    shown: tuple[str, ...]
    """The lines of output that the page shows."""


@dataclass(frozen=True)
class Block:
    page: str
    line: int
    """Of the opening fence, from 1."""
    commands: tuple[Command, ...]
    skip_reason: str | None
    last_status: int

    @property
    def name(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def starts_a_fleet(self) -> bool:
        return any("inferfleet up --detach" in command.text for command in self.commands)

    @property
    def needs_curl(self) -> bool:
        return any(re.search(r"(^|\W)curl\s", command.text) for command in self.commands)


def fences_in(text: str) -> Iterator[tuple[str, int, str, list[str]]]:
    """(language, line of the opening fence, line before it, content) of each fenced block."""
    lines = text.splitlines()
    start = None
    for number, line in enumerate(lines):
        fence = FENCE.match(line)
        if fence is None:
            continue
        if start is None:
            start, language = number, fence[1]
        else:
            before = lines[start - 1].strip() if start else ""
            yield language, start + 1, before, lines[start + 1 : number]
            start = None
    assert start is None, f"line {start}: the block has no end"


def loose_commands(text: str) -> list[str]:
    """Indented lines outside of fenced blocks that look like a command."""
    outside = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    return [line.strip() for line in outside.splitlines() if LOOSE_COMMAND.match(line)]


def blocks_of(name: str, text: str) -> list[Block]:
    """The console blocks of one page.

    Raises:
        ValueError: a block begins with a line that is not a command.
    """
    return [
        Block(name, line, tuple(_commands(content)), _skip_reason(before), _last_status(before))
        for language, line, before, content in fences_in(text)
        if language == "console"
    ]


def _skip_reason(before: str) -> str | None:
    mark = SKIP_MARK.match(before)
    return mark[1] if mark else None


def _last_status(before: str) -> int:
    mark = STATUS_MARK.match(before)
    return int(mark[1]) if mark else 0


def _commands(lines: list[str]) -> Iterator[Command]:
    command, shown = "", list[str]()
    for line in lines:
        if command and _is_open(command):
            command += "\n" + line
        elif line.startswith("$ "):
            if command:
                yield Command(command, tuple(shown))
            command, shown = line[2:], []
        elif command:
            shown.append(line)
        else:
            raise ValueError(f"a console block begins with a command, not with {line!r}")
    if command:
        yield Command(command, tuple(shown))


def _is_open(command: str) -> bool:
    if command.endswith("\\"):
        return True
    try:
        shlex.split(command, comments=True)
    except ValueError:  # an open quote
        return True
    return False


def run_block(
    block: Block, folder: Path, environment: Mapping[str, str], values: Mapping[str, str]
) -> None:
    """Run the commands in one shell in `folder`; `values` replace the placeholders of the page.

    Raises:
        AssertionError: a command exits with another status than the page says, or does not print a
            line that the page shows. Numbers and digests may differ.
    """
    texts = [_resolved(command.text, values) for command in block.commands]
    script = "".join(f"{text}\nprintf '{RECORD}%d{RECORD}' $?\n" for text in texts)
    done = subprocess.run(
        ["bash", "-c", script],
        cwd=folder,
        env=dict(environment),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT_S,
    )
    parts = done.stdout.split(RECORD)
    outputs, statuses = parts[0:-1:2], [int(status) for status in parts[1::2]]
    expected = [0] * (len(texts) - 1) + [block.last_status]
    assert len(statuses) == len(texts), f"{block.name}: the shell ended early:\n{done.stdout}"
    for number, command in enumerate(block.commands):
        where = f"{block.name}: $ {texts[number]}\n{outputs[number]}"
        assert statuses[number] == expected[number], f"exit status {statuses[number]} of {where}"
        missing = missing_lines(command.shown, outputs[number])
        assert missing == [], f"{missing} are shown on the page and not printed by {where}"


def missing_lines(shown: tuple[str, ...], output: str) -> list[str]:
    """The lines of `shown` that are not in `output`, in any order; numbers may differ."""
    printed = {_loose(line) for line in output.splitlines()}
    return [line for line in shown if line.strip(" …") and _loose(line) not in printed]


def _loose(line: str) -> str:
    return " ".join(VARIES.sub("#", line).split())


def _resolved(text: str, values: Mapping[str, str]) -> str:
    for placeholder, value in values.items():
        text = re.sub(rf"(?<!\w){re.escape(placeholder)}(?!\w)", lambda _, v=value: v, text)
    return text
