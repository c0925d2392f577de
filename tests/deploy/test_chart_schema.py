"""The chart's `config` sections accept the services' keys: no more, no fewer."""

import json

import pytest
import yaml

from scripts import gen_helm_schema


def test_the_generated_part_is_up_to_date(chart):
    text = (chart / "values.schema.json").read_text()
    stale = "run: python scripts/gen_helm_schema.py"
    assert gen_helm_schema.updated(text) == text, stale


@pytest.mark.parametrize("service", gen_helm_schema.SERVICES)
def test_every_key_is_either_wired_by_the_chart_or_free(service):
    own = set(gen_helm_schema.config_class(service).__dataclass_fields__)
    free = set(gen_helm_schema.free_keys(service))
    assert gen_helm_schema.WIRED[service] <= own
    assert free < own
    assert not free & gen_helm_schema.WIRED[service]
    # A file inside the container has to come from somewhere: the chart must mount it.
    fields = gen_helm_schema.config_class(service).__dataclass_fields__
    read = [key for key in free if not fields[key].metadata["written"]]
    assert not [key for key in read if key.endswith("_file")]


def test_every_value_of_the_chart_is_in_the_schema(chart):
    schema = json.loads((chart / "values.schema.json").read_text())
    values = yaml.safe_load((chart / "values.yaml").read_text())

    def walk(value, node, path):
        while "$ref" in node:
            node = schema["definitions"][node["$ref"].rpartition("/")[2]]
        if isinstance(value, dict) and "properties" in node:
            assert node["additionalProperties"] is False, path
            for key, inner in value.items():
                assert key in node["properties"], f"{path}.{key}"
                walk(inner, node["properties"][key], f"{path}.{key}")

    walk(values, schema, "")
    assert set(schema["properties"]) - set(values) == {"global"}
