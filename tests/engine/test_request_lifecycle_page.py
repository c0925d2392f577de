"""Every entry point that the reading guide names exists."""

import importlib
import re
from functools import reduce
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "request-lifecycle.md"
ENTRY = re.compile(r"`([\w/]+)\.py:([\w.]+)`")
# Questions per table, as the guide of the code base that it follows has them; two of the third
# table, about windows and slots of state, are our own.
ROWS = [5, 6, 4 + 2, 7, 5]


def test_every_entry_point_resolves():
    entries = ENTRY.findall(PAGE.read_text(encoding="utf-8"))
    assert len(set(entries)) > 30
    for file, symbol in entries:
        module = importlib.import_module("services.engine." + file.replace("/", "."))
        assert reduce(getattr, symbol.split("."), module), (file, symbol)


def test_every_question_has_its_row():
    tables = PAGE.read_text(encoding="utf-8").split("\n## ")[1:6]
    counts = [sum(line.startswith("| ") for line in table.splitlines()) - 1 for table in tables]
    assert counts == ROWS


def test_fields_of_a_sequence_are_named_as_they_are():
    text = PAGE.read_text(encoding="utf-8")
    (row,) = [line for line in text.splitlines() if "keep over rounds" in line]
    names = re.findall(r"`(num_\w+)`", row)
    assert names
    assert set(names) <= set(
        importlib.import_module("services.engine.scheduling.sequence").Sequence.__slots__
    )


def test_what_is_not_built_says_so():
    rows = [
        ln
        for ln in PAGE.read_text(encoding="utf-8").splitlines()
        if ln.startswith("| How do draft")
    ]
    assert all("not yet" in row for row in rows)
    assert rows
