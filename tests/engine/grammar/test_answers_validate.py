"""Schemas of our own through the runner of the public suite: what is taken holds in every draw."""

import pytest

from tests.schema_suite.__main__ import Row, Suite, files_of, table

pytestmark = pytest.mark.timeout(240)
TEXT = {"type": "string"}
LONG = {"$defs": {"word": {"type": "string", "minLength": 1, "maxLength": 3}}}
HOLD = {
    "lengths": ({"minLength": 2, "maxLength": 4}, ["ab", "é😀"], ["a", "abcde", "a\tb", 'a"b']),
    "only a minimum": ({"type": "string", "minLength": 3}, ["abc"], ["ab", "a\x01b"]),
    "long": ({"type": "string", "minLength": 200, "maxLength": 300}, ["x" * 200], ["x" * 199]),
    "free text": (TEXT, ["", 'a"b\\c\n', "\u2028"], [1, None]),
    "pattern": ({"pattern": "^[a-c]+-\\d{2}$"}, ["abc-12"], ["d-12", "a-1"]),
    "pattern without anchors": ({"pattern": "a|b"}, ["a"], ["c", ""]),
    "anchored branches": ({"pattern": "^a$|^b"}, ["a", "b"], ["c"]),
    "anything but": ({"pattern": '^[^a"]{2}$'}, ["bc", "éf"], ["ab", "b"]),
    "any two": ({"pattern": "^.{2}$"}, ["ab"], ["a", "a\n"]),
    "a range with quotes": ({"pattern": "^[ -~]{1,3}$"}, ["ab", "~"], ["é", "abcd"]),
    "no blanks": ({"pattern": "^\\S{2}$"}, ["ab"], ["a ", "a\u00a0"]),
    "integers": ({"type": "integer", "minimum": -3, "exclusiveMaximum": 12}, [-3, 11], [-4, 12]),
    "numbers": ({"minimum": 0.5, "maximum": 1.5}, [0.5, 1, 1.25], [0.4, 1.6]),
    "implied object": (
        {"properties": {"a": {"minimum": 3}, "b": TEXT}, "required": ["a"]},
        [{"a": 3}, {"a": 4, "b": "x"}],
        [{"b": "x"}, {"a": 2}, {"a": 3, "b": 1}],
    ),
    "two implied": ({"maxLength": 1, "maxItems": 1}, ["a", [1]], ["ab", [1, 2]]),
    "any items": ({"type": "array", "minItems": 2, "maxItems": 3}, [[1, "a"]], [[1], [1, 2, 3, 4]]),
    "listed": ({"enum": ['a"b', {"k": [1]}, 2.5, None]}, ['a"b', {"k": [1]}, None], ["a", {}, 3]),
    "map of short words": (
        {**LONG, "type": "object", "additionalProperties": {"$ref": "#/$defs/word"}},
        [{}, {"k": "abc"}],
        [{"k": "abcd"}, {"k": ""}, {"k": 1}],
    ),
    "recursive": (
        {
            "$ref": "#/$defs/list",
            "$defs": {
                "list": {
                    "properties": {"next": {"anyOf": [{"$ref": "#/$defs/list"}, {"type": "null"}]}},
                    "required": ["next"],
                }
            },
        },
        [{"next": None}, {"next": {"next": None}}],
        [{}, {"next": 1}],
    ),
    "tuple": ({"prefixItems": [TEXT, {"type": "integer"}]}, [["a", 1]], [["a", "b"], [1]]),
    "disjoint": (
        {"oneOf": [{"type": "integer"}, {"type": "array", "items": {"maxLength": 2}}]},
        [3, ["ab"]],
        [3.5, ["abc"], "a"],
    ),
}


@pytest.fixture(scope="module")
def suite():
    made = Suite(samples=12, seed=5)
    yield made
    made.close()


def group(name: str, schema, valid=(), invalid=()) -> dict:
    cases = [{"description": str(value), "data": value, "valid": True} for value in valid]
    cases += [{"description": str(value), "data": value, "valid": False} for value in invalid]
    return {"description": name, "schema": schema, "tests": cases}


@pytest.mark.parametrize("name", HOLD)
def test_answers_drawn_at_random_validate(suite, name):
    row = Row()
    suite.run_group(group(name, *HOLD[name]), row)
    assert row.wrong == row.not_compiled == row.narrower == []
    assert (row.enforced, row.rejected) == (1, len(HOLD[name][2]))
    assert row.samples + row.cut == 12
    assert row.samples or name == "long"


def test_the_runner_sees_what_is_wrong(suite):
    row = Row()
    suite.run_group(group("not a number", {"type": "string"}, [1], ["a"]), row)
    suite.run_group(group("refused", {"properties": {"a": {"not": {}}}}), row)
    suite.run_group(group("no grammar", {"type": "string", "pattern": "[]a]"}), row)
    assert row.wrong == ["takes not a number: a"]
    assert row.narrower == ["not a number: 1"]
    assert row.refused == {"not": 1}
    assert len(row.not_compiled) == 1
    lines = list(table({"file": row}))
    assert lines[2] == "| file | 3 | 1: not 1 | 1 | 1 | 0 / 1 | 0 | 12 |"
    assert lines[3].startswith("| all | 3 | 1 | 1 |")


def test_the_runner_reads_a_folder_of_the_suite(tmp_path):
    folder = tmp_path / "tests" / "draft2020-12"
    folder.mkdir(parents=True)
    (folder / "b.json").write_text("[]")
    (folder / "a.json").write_text('[{"description": "x", "schema": true, "tests": []}]')
    assert [name for name, _ in files_of(tmp_path, "draft2020-12")] == ["a", "b"]
    with pytest.raises(SystemExit, match="no such folder"):
        list(files_of(tmp_path / "none", "draft2020-12"))
