"""The records of `make mutants` fit the tree, and its committed result fits the records."""

import json
from collections.abc import Callable

import pytest

from tests.mutants.__main__ import RESULT, changed_faults
from tests.mutants.records import SUBJECTS, Fault, digest_of, problems_of, read_faults
from tests.mutants.score import LEAST_CAUGHT, Outcome

FAULTS = read_faults()


def test_every_record_fits_the_tree():
    assert problems_of(FAULTS) == []


def test_a_hundred_faults_over_all_subjects():
    assert len(FAULTS) >= 100
    assert {fault.subject for fault in FAULTS} == set(SUBJECTS)


def test_the_committed_result_is_of_these_records_and_reaches_the_score():
    result = json.loads(RESULT.read_text())
    ran = {name: found for group in result["outcomes"].values() for name, found in group.items()}
    assert set(ran) <= {fault.name for fault in FAULTS}, "a record was renamed: make mutants"
    assert len(ran) >= 100, 'run: make mutants ARGS="--changed"'
    caught = [name for name, found in ran.items() if found["outcome"] == "caught"]
    assert len(caught) >= LEAST_CAUGHT * len(ran)
    reasons = {fault.name: fault.survives for fault in FAULTS if fault.name in ran}
    assert result["survivors"] == {name: why for name, why in reasons.items() if why}


@pytest.fixture
def record(tmp_path) -> Callable[..., Fault]:
    """Makes records for a tree of one source file and one test file."""
    (tmp_path / "source.py").write_text("a = 1\nb = 2\nc = 2\n")
    (tmp_path / "test_source.py").write_text("def test_it():\n    pass\n")

    def make(**fields) -> Fault:
        whole = {"subject": "s", "name": "n", "file": "source.py", "old": "a = 1", "new": "a = 2"}
        return Fault(**{**whole, "tests": ("test_source.py::test_it",), **fields})

    return make


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({}, None),
        ({"old": "= 2"}, "source.py has the text of `old` 2 times, expected once"),
        ({"old": "d = 1"}, "source.py has the text of `old` 0 times, expected once"),
        ({"new": "a = 1"}, "`old` and `new` are the same"),
        ({"file": "gone.py"}, "there is no file gone.py"),
        ({"tests": ("test_gone.py",)}, "there is no test test_gone.py"),
        (
            {"tests": ("test_source.py::test_gone[1]",)},
            "there is no test test_source.py::test_gone",
        ),
    ],
)
def test_a_record_that_does_not_fit_is_named(record, tmp_path, fields, problem):
    found = problems_of([record(**fields)], tmp_path)
    assert (found == []) if problem is None else (problem in found[0] and "s.toml, 'n'" in found[0])


@pytest.mark.parametrize("changed", ["source.py", "test_source.py", "the record"])
def test_an_outcome_is_valid_until_its_record_file_or_tests_change(record, tmp_path, changed):
    fault = record()
    (tmp_path / "another.py").write_text("")
    outcomes = {"n": Outcome("caught", digest=digest_of(fault, tmp_path))}
    assert changed_faults([fault], outcomes, 0, tmp_path) == []
    assert changed_faults([fault], outcomes, 1, tmp_path) == [fault]
    if changed == "the record":
        fault = record(new="a = 3")
    else:
        (tmp_path / changed).write_text("a = 1\n")
    assert changed_faults([fault], outcomes, 0, tmp_path) == [fault]
    assert changed_faults([fault], {}, 0, tmp_path) == [fault]


def test_a_name_is_used_once(record, tmp_path):
    assert "used twice" in problems_of([record(), record(old="b = 2")], tmp_path)[0]
