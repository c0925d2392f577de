"""Structural tags: which are taken, what they match, and what an answer under them is."""

import json

import pytest

from services.engine.grammar.schema_refused import SchemaRefusedError
from services.engine.grammar.tag_check import check_tag
from services.engine.grammar.tag_format import compiler_tag

ARGUMENTS = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
JSON = {"type": "json_schema", "json_schema": ARGUMENTS}
CALL = {"type": "tag", "begin": "<tool_call>", "content": JSON, "end": "</tool_call>"}
TOKEN_CALL = {**CALL, "begin": {"type": "token", "token": "[CALL]"}}


def tag(form) -> str:
    return json.dumps({"type": "structural_tag", "format": form})


def triggered(**members) -> dict:
    return {"type": "triggered_tags", "triggers": ["<tool_call>"], "tags": [CALL], **members}


@pytest.mark.parametrize(
    ("form", "path"),
    [
        ({"type": "poem"}, "/format/type"),
        ({"type": ["tag"]}, "/format/type"),
        ("text", "/format/type"),
        ({**JSON, "style": "qwen_xml"}, "/format/style"),
        ({**JSON, "any_order": True}, "/format/any_order"),
        ({**JSON, "excludes": ["x"]}, "/format/excludes"),
        ({**JSON, "max_whitespace_cnt": 9}, "/format/max_whitespace_cnt"),
        (
            {"type": "json_schema", "json_schema": {"type": "integer", "multipleOf": 2}},
            "/format/json_schema/multipleOf",
        ),
        ({"type": "regex", "pattern": "(?=a)b"}, "/format/pattern"),
        ({"type": "regex", "pattern": "a", "excludes": ["a"]}, "/format/excludes"),
        ({"type": "grammar", "grammar": "start: A", "syntax": "lark"}, "/format/syntax"),
        ({"type": "sequence", "elements": []}, "/format/elements"),
        ({"type": "or", "elements": [JSON, {"type": "const_string"}]}, "/format/elements/1/value"),
        ({**CALL, "begin": 3}, "/format/begin"),
        ({**CALL, "begin": JSON}, "/format/begin/type"),
        ({**CALL, "end": []}, "/format/end"),
        ({**CALL, "bogus": 1}, "/format/bogus"),
        (triggered(triggers=[""]), "/format/triggers/0"),
        (triggered(triggers=["<x>"]), "/format/tags/0/begin"),
        (triggered(triggers=["<tool", "<tool_call>"]), "/format/tags/0/begin"),
        (triggered(tags=[JSON]), "/format/tags/0/type"),
        (triggered(tags=[TOKEN_CALL]), "/format/tags/0/begin"),
        (triggered(at_least_one=1), "/format/at_least_one"),
        (
            {"type": "token_triggered_tags", "trigger_tokens": ["[CALL]"], "tags": [CALL]},
            "/format/tags/0/begin",
        ),
        ({"type": "token", "token": -1}, "/format/token"),
        ({"type": "repeat", "content": JSON, "min": 3, "max": 2}, "/format/max"),
        ({"type": "repeat", "content": JSON, "min": 0, "max": -1}, "/format/max"),
        ({"type": "any_text", "max_tokens": -1}, "/format/max_tokens"),
        ({"type": "any_text", "max_chars": 2}, "/format/max_chars"),
    ],
)
def test_what_cannot_hold_is_refused_by_its_path(form, path):
    with pytest.raises(SchemaRefusedError) as caught:
        check_tag(tag(form))
    assert caught.value.path == path


def test_the_outermost_members_and_the_older_form_are_checked_too():
    older = {"type": "structural_tag", "triggers": ["<f"]}
    structure = {"begin": "<f>", "schema": ARGUMENTS, "end": "</f>"}
    assert check_tag(json.dumps({**older, "structures": [structure]}))
    bad = {"type": "integer", "multipleOf": 2}
    for given, path in [
        ({"type": "tag"}, "/type"),
        ({"type": "structural_tag"}, "/format"),
        ({**older, "structures": []}, "/structures"),
        (
            {**older, "structures": [{**structure, "schema": bad}]},
            "/structures/0/schema/multipleOf",
        ),
        ([], ""),
    ]:
        with pytest.raises(SchemaRefusedError) as caught:
            check_tag(json.dumps(given))
        assert caught.value.path == path


def test_the_check_of_a_tag_is_bounded():
    deep: dict = {"type": "const_string", "value": "x"}
    for _ in range(30):
        deep = {"type": "star", "content": deep}
    wide = {"type": "regex", "pattern": "[a-\U0010ffff]" * 100}
    many = [{"type": "const_string", "value": "x"}] * 1001
    for form, problem in [
        (deep, "deeper"),
        ({"type": "sequence", "elements": [wide, wide]}, "all patterns together"),
        ({"type": "sequence", "elements": many}, "more than 1000 formats"),
    ]:
        with pytest.raises(SchemaRefusedError, match=problem):
            check_tag(tag(form))
    with pytest.raises(SchemaRefusedError, match="twice"):
        check_tag('{"type":"structural_tag","type":"structural_tag"}')


def for_compiler(form):
    names = {"[CALL]": 300, "<end>": 258}
    return json.loads(
        compiler_tag(
            tag(form),
            id_of=names.get,
            vocab_size=320,
            end_ids=[258],
            json_format=lambda schema, blanks: {"schema": schema, "blanks": blanks},
        )
    )["format"]


def test_schemas_get_the_compiler_s_form_and_tokens_become_ids():
    form = {"type": "sequence", "elements": [{**JSON, "max_whitespace_cnt": 2}, TOKEN_CALL]}
    first, second = for_compiler(form)["elements"]
    assert first == {"schema": ARGUMENTS, "blanks": 2}
    assert second["content"] == {"schema": ARGUMENTS, "blanks": None}
    assert second["begin"] == {"type": "token", "token": 300}
    tokens = {"type": "token_triggered_tags", "trigger_tokens": ["[CALL]"], "tags": [TOKEN_CALL]}
    assert for_compiler(tokens)["trigger_tokens"] == [300]
    # What a schema itself says is none of the tag's words.
    odd = {"type": "json_schema", "json_schema": {"const": {"type": "token", "token": "[CALL]"}}}
    assert for_compiler(odd)["schema"] == odd["json_schema"]


@pytest.mark.parametrize("token", ["[NONE]", 320, "<end>", 258])
def test_tokens_that_the_model_lacks_or_that_end_an_answer_are_refused(token):
    with pytest.raises(ValueError, match="token"):
        for_compiler({"type": "token", "token": token})
