"""Write the table by keyword of docs/structured-output.md; `--check` only compares.

Each row is a small schema that goes through the check and the engine that the check chooses. Exact:
all of the row's values can be produced. Narrower: some cannot. Refused: the check names the path.
"""

import json
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from services.engine.grammar.schema_plan import LLGUIDANCE, plan_schema
from services.engine.grammar.schema_refused import SchemaRefusedError
from services.engine.grammar.wire import Ready, Setup

PAGE = Path(__file__).parent.parent / "docs" / "structured-output.md"
_TABLE = re.compile(r"(?<=<!-- table by keyword: begin -->\n).*?(?=<!-- end -->)", re.DOTALL)
_SIZE, _END = 300, 258


class Probe(NamedTuple):
    """A row: keywords in Markdown, a schema that shows them, and values that satisfy it."""

    keyword: str
    schema: str
    values: str


PROBES = [
    Probe("`type`", '{"type": ["string", "null"]}', '["a", null]'),
    Probe("`enum`", '{"enum": [1, "a", null]}', '[1, "a", null]'),
    Probe("`const`", '{"const": "a"}', '["a"]'),
    Probe(
        "`properties`, `required`",
        '{"properties": {"a": {"type": "integer"}}, "required": ["a"]}',
        '[{"a": 1}, {"a": 1, "b": 2}]',
    ),
    Probe("`required` alone", '{"type": "object", "required": ["a"]}', '[{"a": 1, "b": 2}]'),
    Probe(
        "`additionalProperties`",
        '{"properties": {"a": {"type": "null"}}, "additionalProperties": false}',
        '[{}, {"a": null}]',
    ),
    Probe("", '{"additionalProperties": {"type": "null"}}', '[{}, {"a": null, "b": null}]'),
    Probe(
        "",
        '{"properties": {"a": {"type": "null"}}, "additionalProperties": {"type": "boolean"}}',
        '[{"a": null}, {"a": null, "b": true}]',
    ),
    Probe(
        "`patternProperties`",
        '{"patternProperties": {"^x": {"type": "null"}}}',
        '[{"x1": null}, {"y": 1}]',
    ),
    Probe("`propertyNames`", '{"propertyNames": {"pattern": "^[ab]$"}}', '[{}, {"a": 1, "b": 2}]'),
    Probe("", '{"propertyNames": {"enum": ["a", "b"]}}', '[{}, {"a": 1, "b": 2}]'),
    Probe("", '{"propertyNames": {"not": {"const": "a"}}}', '[{"b": 1}]'),
    Probe("`minProperties`", '{"minProperties": 1}', '[{"a": 1}, {"a": 1, "b": 2}]'),
    Probe(
        "",
        '{"properties": {"a": {}, "b": {}, "c": {}}, "minProperties": 2}',
        '[{"a": 1, "b": 2}, {"a": 1, "c": 2}]',
    ),
    Probe("", '{"type": "object", "minProperties": 2}', '[{"a": 1, "b": 2}]'),
    Probe("`maxProperties`", '{"maxProperties": 1}', '[{}, {"a": 1}]'),
    Probe("", '{"properties": {"a": {}, "b": {}}, "maxProperties": 1}', '[{"a": 1}, {"c": 1}]'),
    Probe(
        "`dependentRequired`",
        '{"properties": {"a": {}, "b": {}}, "dependentRequired": {"a": ["b"]}}',
        '[{}, {"b": 1}, {"a": 1, "b": 2}]',
    ),
    Probe(
        "`dependentSchemas`, `dependencies`",
        '{"properties": {"a": {}, "b": {}}, "dependentSchemas": {"a": {"required": ["b"]}}}',
        '[{}, {"b": 1}, {"a": 1, "b": 2}]',
    ),
    Probe(
        "`unevaluatedProperties`",
        '{"allOf": [{"properties": {"a": {"type": "null"}}}], "unevaluatedProperties": false}',
        '[{}, {"a": null}]',
    ),
    Probe("", '{"unevaluatedProperties": {"type": "null"}}', '[{"a": null}]'),
    Probe("`items`", '{"items": {"type": "null"}}', "[[], [null, null]]"),
    Probe(
        "`minItems`, `maxItems`", '{"type": "array", "minItems": 1, "maxItems": 2}', "[[1], [1, 2]]"
    ),
    Probe(
        "`prefixItems`",
        '{"prefixItems": [{"type": "integer"}], "items": false}',
        "[[], [1]]",
    ),
    Probe(
        "",
        '{"prefixItems": [{"type": "integer"}, {"type": "null"}], "minItems": 2, "maxItems": 2}',
        "[[1, null]]",
    ),
    Probe("`contains`", '{"contains": {"type": "null"}}', "[[null], [null, 1], [1, null]]"),
    Probe("`minContains`", '{"contains": {"type": "null"}, "minContains": 2}', "[[null, 1, null]]"),
    Probe("`maxContains`", '{"contains": {"type": "null"}, "maxContains": 1}', "[[null]]"),
    Probe(
        "`uniqueItems`",
        '{"items": {"enum": ["a", "b"]}, "uniqueItems": true}',
        '[[], ["a"], ["b", "a"]]',
    ),
    Probe("", '{"items": {"type": "string"}, "uniqueItems": true}', '[["a", "b"]]'),
    Probe("`unevaluatedItems`", '{"prefixItems": [{}], "unevaluatedItems": false}', "[[], [1]]"),
    Probe("`minLength`, `maxLength`", '{"minLength": 2, "maxLength": 3}', '["ab", "é a"]'),
    Probe("", '{"type": "string", "maxLength": 5}', '["a\\nb"]'),
    Probe("`pattern`", '{"pattern": "^[a-z]+$"}', '["abc"]'),
    Probe("", '{"pattern": "b"}', '["b", "abc"]'),
    Probe("", '{"pattern": "b", "maxLength": 3}', '["b", "abc"]'),
    Probe("", '{"pattern": "^a\\"$"}', '["a\\""]'),
    Probe("", '{"pattern": "^(?!a)"}', '["b"]'),
    *(
        Probe("`format`" if name == "date" else "", f'{{"format": "{name}"}}', json.dumps([value]))
        for name, value in (
            ("date", "2024-02-29"),
            ("date-time", "2024-02-29T10:11:12Z"),
            ("time", "10:11:12Z"),
            ("duration", "P1DT2H"),
            ("email", "a.b@example.com"),
            ("idn-email", "ä@example.com"),
            ("hostname", "www.example.com"),
            ("idn-hostname", "ä.example.com"),
            ("ipv4", "127.0.0.1"),
            ("ipv6", "::1"),
            ("uuid", "123e4567-e89b-12d3-a456-426614174000"),
            ("uri", "https://example.com/a?b#c"),
            ("uri-reference", "../a"),
            ("iri", "https://example.com/ä"),
            ("json-pointer", "/a/0"),
            ("regex", "^(?:a|b)$"),
        )
    ),
    Probe("any other `format`", '{"type": "string", "format": "color"}', '["#fff"]'),
    Probe("`minimum`, `maximum`", '{"type": "integer", "minimum": 1, "maximum": 20}', "[1, 20]"),
    Probe("`exclusiveMinimum`, …", '{"exclusiveMinimum": 0, "exclusiveMaximum": 1}', "[0.5]"),
    Probe("`multipleOf`", '{"type": "integer", "multipleOf": 5}', "[0, 5, -10]"),
    Probe("`anyOf`", '{"anyOf": [{"type": "string"}, {"type": "null"}]}', '["a", null]'),
    Probe(
        "",
        '{"properties": {"a": {}}, "anyOf": [{"required": ["a"]}, {"required": ["b"]}]}',
        '[{"a": 1}, {"b": 1}]',
    ),
    Probe("`oneOf`", '{"oneOf": [{"type": "string"}, {"type": "null"}]}', '["a", null]'),
    Probe(
        "",
        '{"oneOf": [{"properties": {"k": {"const": 1}}}, {"properties": {"k": {"const": 2}}}]}',
        '[{"k": 1}, {"k": 2}]',
    ),
    Probe("", '{"oneOf": [{"required": ["a"]}, {"required": ["b"]}]}', '[{"a": 1}, {"b": 1}]'),
    Probe("", '{"oneOf": [{"pattern": "a"}, {"pattern": "b"}]}', '["a"]'),
    Probe(
        "`allOf`",
        '{"allOf": [{"properties": {"a": {}}}, {"required": ["a"]}]}',
        '[{"a": 1}]',
    ),
    Probe("`not`", '{"type": "string", "not": {"enum": ["a", "b"]}}', '["", "c", "ab"]'),
    Probe("", '{"type": "integer", "not": {"minimum": 5}}', "[4]"),
    Probe("", '{"type": "integer", "not": {"enum": [5]}}', "[4, 6]"),
    Probe("", '{"type": "integer", "not": {"enum": [5, 8]}}', "[4, 6]"),
    Probe("", '{"type": "string", "not": {"pattern": "a"}}', '["b"]'),
    Probe(
        "`if`, `then`, `else`",
        '{"if": {"required": ["a"]}, "then": {"required": ["b"]}, "type": "object"}',
        '[{}, {"a": 1, "b": 2}]',
    ),
    Probe(
        "`$ref`, `$defs`, `definitions`",
        '{"$ref": "#/$defs/a", "$defs": {"a": {"type": "null"}}}',
        "[null]",
    ),
    Probe(
        "`$ref` beside keywords",
        '{"$ref": "#/$defs/a", "minimum": 3, "$defs": {"a": {"type": "integer"}}}',
        "[3]",
    ),
    Probe(
        "`$anchor`", '{"$ref": "#x", "$defs": {"a": {"$anchor": "x", "type": "null"}}}', "[null]"
    ),
    Probe("`$ref` to another document", '{"$ref": "https://example.com/a.json"}', "[]"),
    Probe("`$dynamicRef`", '{"$dynamicRef": "#a"}', "[]"),
    Probe("any other keyword", '{"title": "t", "x-unit": "m", "type": "null"}', "[null]"),
]


class Row(NamedTuple):
    """What became of a probe."""

    probe: Probe
    engine: str
    result: str


def rows() -> Iterator[Row]:
    """Each probe through the check and its engine."""
    for probe in PROBES:
        try:
            plan = plan_schema(probe.schema)
        except SchemaRefusedError as error:
            yield Row(probe, "none", f"refused at `{error.path}`")
            continue
        produced = all(
            _produces(plan.backend, plan.schema, one) for one in json.loads(probe.values)
        )
        yield Row(probe, plan.backend, "exact" if produced else "narrower")


def table() -> str:
    """The table in Markdown."""
    lines = ["| keyword | for example | engine | result |", "|---|---|---|---|"]
    for probe, engine, result in rows():
        lines.append(f"| {probe.keyword} | `{probe.schema}` | {engine} | {result} |")
    return "\n".join(lines) + "\n"


def updated(page: str) -> str:
    """The page with the table in place."""
    return _TABLE.sub(lambda _: table(), page)


@cache
def _compilers() -> tuple[Any, Any]:
    import xgrammar

    from services.engine.grammar.compiler_main import tokenizer_info
    from services.engine.grammar.strict_engine import StrictCompiler
    from services.engine.grammar.vocabulary import model_tokenizer, vocabulary_of

    setup = Setup("", _SIZE, [_END], 1 << 30)
    ready = Ready(vocabulary_of(model_tokenizer(""), _SIZE))
    info = tokenizer_info(setup, ready)
    return xgrammar.GrammarCompiler(info, max_threads=1), StrictCompiler(setup, ready)


def _produces(backend: str, schema: Any, value: Any) -> bool:
    from services.engine.grammar.compiler_main import compile_schema
    from services.engine.grammar.so_matcher import XGrammarState
    from services.engine.grammar.strict_engine import StrictState

    compiler, strict = _compilers()
    state: Any
    if backend == LLGUIDANCE:
        state = StrictState(strict.start(strict.compile(schema)), [_END])
    else:
        state = XGrammarState(compile_schema(compiler, schema))
    text = json.dumps(value, ensure_ascii=False).encode()
    return all(state.accept(token) for token in (*text, _END))


def main() -> int:
    """Rewrite the page, or with --check return 1 if it would change."""
    now = PAGE.read_text()
    wanted = updated(now)
    if sys.argv[1:] == ["--check"]:
        if now != wanted:
            print("docs/structured-output.md is stale: run python scripts/gen_schema_table.py")
        return int(now != wanted)
    PAGE.write_text(wanted)
    return 0


if __name__ == "__main__":
    sys.exit(main())
