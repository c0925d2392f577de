"""The table by keyword in docs/structured-output.md is what the check and the engines do."""

import json

import jsonschema
import pytest

from scripts import gen_schema_table
from services.engine.grammar import schema_normal
from services.engine.grammar.strict_schema import KEYWORDS

pytestmark = pytest.mark.timeout(240)


def test_the_table_is_up_to_date():
    page = gen_schema_table.PAGE.read_text()
    stale = "run: python scripts/gen_schema_table.py"
    assert gen_schema_table.updated(page) == page, stale
    assert page.count("| refused at `/") >= 8


def test_every_keyword_has_a_row():
    shown = "".join(probe.schema for probe in gen_schema_table.PROBES)
    named = "".join(probe.keyword for probe in gen_schema_table.PROBES)
    constraining = KEYWORDS.union(*schema_normal.OF_TYPE.values()) - {"additionalItems"}
    missing = [key for key in constraining if f'"{key}"' not in shown and f"`{key}`" not in named]
    assert not missing


@pytest.mark.parametrize("probe", gen_schema_table.PROBES, ids=lambda probe: probe.schema[:60])
def test_the_values_of_a_row_satisfy_its_schema(probe):
    schema = json.loads(probe.schema)
    for value in json.loads(probe.values):
        jsonschema.Draft202012Validator(schema).validate(value)
