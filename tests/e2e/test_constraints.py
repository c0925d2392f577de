"""Structured output through gateway, balancer and engine, by clients of other projects."""

import json

import jsonschema
import openai
import pytest

from inferfleet_cli.main import main

pytestmark = [pytest.mark.e2e, pytest.mark.model, pytest.mark.timeout(240)]
MODEL = "smollm2-135m-instruct"
CITY = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "minLength": 1, "maxLength": 24},
        "population": {"type": "integer", "minimum": 0, "maximum": 99999999},
    },
    "required": ["city", "population"],
    "additionalProperties": False,
}
QUESTION = [{"role": "user", "content": "Name a city and its population as JSON."}]


@pytest.fixture
def client(fleet):
    with openai.OpenAI(base_url=f"{fleet.http_url}/v1", api_key="none", max_retries=0) as client:
        yield client


def response_format(schema) -> dict:
    return {"type": "json_schema", "json_schema": {"name": "city", "schema": schema}}


def test_the_openai_client_gets_json_of_its_schema_whole_and_streamed(client):
    given = {
        "model": MODEL,
        "messages": QUESTION,
        "seed": 5,
        "response_format": response_format(CITY),
    }
    whole = client.chat.completions.create(**given)
    assert whole.choices[0].finish_reason == "stop"
    jsonschema.validate(json.loads(whole.choices[0].message.content), CITY)
    chunks = list(client.chat.completions.create(**given, stream=True))
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    jsonschema.validate(json.loads(text), CITY)
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_a_schema_that_cannot_be_enforced_is_refused_by_its_keyword(client):
    schema = {"type": "object", "properties": {"n": {"type": "array", "uniqueItems": True}}}
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(
            model=MODEL, messages=QUESTION, response_format=response_format(schema)
        )
    assert caught.value.body["param"] == "response_format"
    assert "/properties/n/uniqueItems" in caught.value.body["message"]


def test_the_command_takes_a_schema_and_a_pattern(fleet, capsys, tmp_path):
    schema = tmp_path / "city.json"
    schema.write_text(json.dumps(CITY))
    address = ["--address", fleet.grpc_address, "--seed", "3", "--json"]
    assert main(["generate", "A city: ", "--json-schema", str(schema), *address]) == 0
    answer = json.loads(capsys.readouterr().out)
    jsonschema.validate(json.loads(answer["text"]), CITY)
    assert answer["finish_reason"] == "GRAMMAR_COMPLETE"
    assert main(["generate", "Call ", "--regex", "[0-9]{3}-[0-9]{4}", *address]) == 0
    assert len(json.loads(capsys.readouterr().out)["text"]) == 8
