"""A call of a tool by the fleet's own model, which was taught none, with the official client."""

import json
import re
import subprocess
import sys
from pathlib import Path

import jsonschema
import openai
import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.model, pytest.mark.timeout(240)]
MODEL = "smollm2-135m-instruct"
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"enum": ["outside", "kitchen"]},
        "values": {"type": "array", "items": {"type": "integer"}, "maxItems": 4},
    },
    "required": ["name", "values"],
    "additionalProperties": False,
}
TOOL = {
    "type": "function",
    "function": {"name": "log_reading", "description": "Store readings.", "parameters": SCHEMA},
}
MESSAGES = [{"role": "user", "content": "Log the readings 3 and 4 of the kitchen."}]
NAMED = {"type": "function", "function": {"name": "log_reading"}}


@pytest.fixture
def client(fleet):
    with openai.OpenAI(base_url=f"{fleet.http_url}/v1", api_key="none", max_retries=0) as client:
        yield client


def given(**more):
    common = {"model": MODEL, "messages": MESSAGES, "tools": [TOOL], "parallel_tool_calls": False}
    return {**common, "temperature": 0, "max_tokens": 200, **more}


@pytest.mark.parametrize(("choice", "finish"), [("required", "tool_calls"), (NAMED, "stop")])
def test_a_demanded_call_streamed_and_whole(client, choice, finish):
    whole = client.chat.completions.create(**given(tool_choice=choice)).choices[0]
    (call,) = whole.message.tool_calls
    assert (call.function.name, whole.finish_reason) == ("log_reading", finish)
    jsonschema.validate(json.loads(call.function.arguments), SCHEMA)
    with client.chat.completions.stream(**given(tool_choice=choice)) as stream:
        final = stream.get_final_completion().choices[0]
    assert final.message.tool_calls[0].function.arguments == call.function.arguments
    assert final.finish_reason == finish
    result = {"role": "tool", "tool_call_id": call.id, "content": "stored"}
    messages = [*MESSAGES, whole.message, result]
    after = client.chat.completions.create(
        **given(messages=messages, tool_choice="none", max_tokens=8)
    )
    assert after.choices[0].message.tool_calls is None


def test_cut_inside_the_arguments(client):
    cut = client.chat.completions.create(**given(tool_choice="required", max_tokens=16)).choices[0]
    assert cut.finish_reason == "length"
    with pytest.raises(json.JSONDecodeError):
        json.loads(cut.message.tool_calls[0].function.arguments)


def test_a_schema_that_cannot_be_enforced_names_its_tool(client):
    bad = {"type": "object", "properties": {"n": {"type": "integer", "multipleOf": 3}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": bad}}
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**given(tools=[TOOL, tool], tool_choice="required"))
    assert caught.value.body["param"] == "tools[1].function.parameters"
    assert "/properties/n/multipleOf" in caught.value.body["message"]


def test_the_example(fleet):
    script = Path(__file__).parents[2] / "examples" / "python" / "tools.py"
    command = [sys.executable, str(script), "--base-url", f"{fleet.http_url}/v1"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert re.match(r'read_temperature\(\{\s*"room":\s*"(kitchen|cellar)"\s*\}\)', done.stdout)
