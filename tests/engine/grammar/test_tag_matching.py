"""What structural tags match, through the compiler's process and byte by byte."""

import json

import pytest

from services.engine.contract.sampling_params import Constraint
from services.engine.grammar.constraint_check import check_constraint
from services.engine.grammar.structured_output import INVALID

END = 258
pytestmark = pytest.mark.timeout(240)

TAG_JSON = {
    "type": "json_schema",
    "json_schema": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
}
CALL = {"type": "tag", "begin": "<call>", "content": TAG_JSON, "end": "</call>"}
BY_TOKEN = {"type": "tag", "begin": {"type": "token", "token": "<|im_start|>"}, "end": "!"}
ONE = '<call>{"a": 1}</call>'


def tag_of(form) -> Constraint:
    constraint = Constraint(
        "structural_tag", json.dumps({"type": "structural_tag", "format": form})
    )
    check_constraint(constraint)
    return constraint


@pytest.mark.parametrize(
    ("form", "taken", "refused"),
    [
        (CALL, [ONE], ["", "a" + ONE, ONE + "a", "<call>{}</call>"]),
        (
            {"type": "triggered_tags", "triggers": ["<call>"], "tags": [CALL]},
            ["", "a", ONE, f"a {ONE}{ONE} b"],
            ["<call>", "a <call>b"],
        ),
        (
            {
                "type": "triggered_tags",
                "triggers": ["<call>"],
                "tags": [CALL],
                "at_least_one": True,
                "stop_after_first": True,
            },
            [ONE],
            ["", "a", ONE + "a", ONE + ONE],
        ),
        (
            {"type": "tags_with_separator", "tags": [CALL], "separator": ",", "at_least_one": True},
            [ONE, f"{ONE},{ONE}"],
            ["", ONE + ONE, "a"],
        ),
        (
            {
                "type": "sequence",
                "elements": [
                    {
                        "type": "tag",
                        "begin": "",
                        "content": {"type": "any_text"},
                        "end": "</think>",
                    },
                    {"type": "regex", "pattern": "\n{0,2}"},
                    TAG_JSON,
                ],
            },
            ['hm</think>\n\n{"a": 1}', '</think>{"a": 1}', '{"</think>{"a": 1}'],
            ['{"a": 1}', "hm</think>hm", 'hm</think>\n\n\n{"a": 1}'],
        ),
        (
            {
                "type": "or",
                "elements": [{"type": "grammar", "grammar": 'root ::= "x" | "y"'}, CALL],
            },
            ["x", "y", ONE],
            ["xy", ""],
        ),
        (
            {
                "type": "repeat",
                "min": 1,
                "max": 2,
                "content": {"type": "const_string", "value": "é"},
            },
            ["é", "éé"],
            ["", "ééé"],
        ),
        ({"type": "any_text", "excludes": ["no"]}, ["", "né"], ["no", "ano"]),
        (
            TAG_JSON,
            ["{" + " " * 8 + '"a": 1}'],
            ["{" + " " * 9 + '"a": 1}', '{"a":' + " " * 50 + "1}"],
        ),
    ],
)
def test_structural_tags_match_what_the_page_says(wait_for, allows, form, taken, refused):
    built = wait_for(tag_of(form))
    assert built.problem is None
    assert [text for text in taken if not allows(built, text)] == []
    assert [text for text in refused if allows(built, text)] == []


def test_white_space_and_control_characters_are_out_of_bounded_strings_too(wait_for, allows):
    short = {"type": "object", "properties": {"a": {"maxLength": 3}}, "required": ["a"]}
    form = {**CALL, "content": {"type": "json_schema", "json_schema": short}}
    for built in (
        wait_for(tag_of(form)),
        wait_for(tag_of({**form, "content": {**form["content"], "max_whitespace_cnt": 8}})),
    ):
        assert allows(built, '<call>{"a":        "xyz"}</call>')
        assert not allows(built, '<call>{"a":         "xyz"}</call>')
        assert not allows(built, '<call>{"a": "wxyz"}</call>')
        assert not allows(built, '<call>{"a": "x\ty"}</call>')


def test_the_older_form_of_a_tag_is_triggered(wait_for, allows):
    structure = {"begin": "<call>", "schema": TAG_JSON["json_schema"], "end": "</call>"}
    older = {"type": "structural_tag", "structures": [structure], "triggers": ["<call"]}
    built = wait_for(Constraint("structural_tag", json.dumps(older)))
    assert allows(built, f"a {ONE} b")
    assert not allows(built, '<call>{"a": "x"}</call>')


def test_special_tokens_are_met_by_name_and_by_nothing_else(wait_for, allowed_ids):
    named = wait_for(tag_of({**BY_TOKEN, "content": TAG_JSON})).grammar.matcher()
    assert allowed_ids(named) == {257}
    assert named.replay([257, *b'{"a": 7}!', END])
    texts = [
        Constraint("regex", "[^a]*"),
        Constraint("ebnf", "root ::= [^a]*"),
        Constraint("json_object", ""),
        Constraint("json_schema", '{"type":"string"}'),
        tag_of({"type": "any_text"}),
    ]
    for constraint in texts:
        assert not allowed_ids(wait_for(constraint).grammar.matcher()) & {256, 257}
    inside = wait_for(texts[3]).grammar.matcher()
    assert inside.accept(ord('"'))
    assert not allowed_ids(inside) & {256, 257, END, 0xFF}
    lacking = wait_for(tag_of({"type": "token", "token": "[NONE]"}))
    assert (lacking.problem, lacking.reason) == ("the model has no token '[NONE]'", INVALID)
    ends = wait_for(tag_of({"type": "token", "token": END}))
    assert "ends an answer" in ends.problem


def test_a_budget_of_tokens_ends_thinking(wait_for, allowed_ids):
    thinking = {"type": "any_text", "max_tokens": 5}
    form = {"type": "tag", "begin": "<think>", "content": thinking, "end": "</think>"}
    matcher = wait_for(tag_of(form)).grammar.matcher()
    assert matcher.replay(list(b"<think>abcd"))
    assert len(allowed_ids(matcher)) > 100
    for byte in b"e</think>":
        assert matcher.accept(byte)
        assert len(allowed_ids(matcher)) == 1
