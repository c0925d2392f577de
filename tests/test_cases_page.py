"""Every test that docs/cases.md names exists, and every case has its row."""

import ast
import re
from pathlib import Path

TESTS = Path(__file__).parent
PAGE = (TESTS.parent / "docs" / "cases.md").read_text(encoding="utf-8")
NAMED = re.compile(r"`([\w/]+\.py)::(\w+)`")
CASES = range(1, 68, 2)


def names_in(path: Path) -> set[str]:
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, kinds)}


def test_every_named_test_exists():
    named = set(NAMED.findall(PAGE))
    assert len(named) > 80
    missing = [
        f"{file}::{name}"
        for file, name in sorted(named)
        if not (TESTS / file).is_file() or name not in names_in(TESTS / file)
    ]
    assert not missing


def test_every_case_has_a_row_with_tests():
    rows = re.findall(r"^\| PR-(\d\d) .*", PAGE, re.MULTILINE)
    assert [int(number) for number in rows] == list(CASES)
    for row in re.findall(r"^\| PR-.*", PAGE, re.MULTILINE):
        assert NAMED.search(row), row
