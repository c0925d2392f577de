"""A model of random weights calls tools rightly: the engine's grammar, the gateway's parser, the
official client. Its vocabulary is single bytes and the marks of a reasoning model."""

import contextlib
import json
import subprocess
import sys
import time
from pathlib import Path

import jsonschema
import openai
import pytest

from tests.doubles.tiny_model import TinyShape, write_tiny_model

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]
ROOT = Path(__file__).resolve().parents[2]
SCHEMA = {
    "type": "object",
    "properties": {
        "on": {"type": "boolean"},
        "values": {"type": "array", "items": {"enum": [1, 22, 333]}, "maxItems": 4},
    },
    "required": ["on", "values"],
}
TOOLS = [
    {"type": "function", "function": {"name": "log_reading", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "other"}},
]
NAMED = {"type": "function", "function": {"name": "log_reading"}}
END_OF_THINKING = 256
# The first special token becomes the mark; the prompt ends in reasoning unless that is turned off.
TEMPLATE = (
    "{% for m in messages %}{{ m.content }}<eot>{% endfor %}"
    "<think>{% if enable_thinking is false %}</think>{% endif %}"
)


@contextlib.contextmanager
def process(module, folder, *flags):
    """What it says once it is ready."""
    ready = folder / f"{module}.json"
    log = (folder / f"{module}.log").open("w")
    command = [sys.executable, "-m", module, "--port=0", "--metrics-port=0", *flags]
    with log, subprocess.Popen([*command, f"--ready-file={ready}"], stderr=log, cwd=ROOT) as child:
        try:
            give_up = time.monotonic() + 150
            while not ready.exists():
                assert child.poll() is None, Path(log.name).read_text()
                assert time.monotonic() < give_up, f"{module} is not ready in time"
                time.sleep(0.05)
            yield json.loads(ready.read_text())
        finally:
            child.terminate()
            try:
                child.wait(30)
            except subprocess.TimeoutExpired:
                child.kill()


def model_that_reasons(folder):
    model = write_tiny_model(folder / "tiny", TinyShape(max_position=4096))
    config = json.loads((model / "tokenizer_config.json").read_text())
    config |= {"chat_template": TEMPLATE, "bos_token": "</think>"}
    (model / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = (model / "tokenizer.json").read_text()
    (model / "tokenizer.json").write_text(tokenizer.replace('"<s>"', '"</think>"'))
    return model


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    folder = tmp_path_factory.mktemp("calls")
    flags = ("--served-name=tiny", "--max-model-len=4096", "--num-blocks=600", "--threads=1")
    with (
        process("services.engine", folder, f"--model={model_that_reasons(folder)}", *flags) as one,
        process(
            "services.gateway",
            folder,
            "--http-port=0",
            f"--engines={one['address']}",
            f"--balancers={one['address']}",
        ) as gateway,
        openai.OpenAI(
            base_url=f"http://{gateway['http_address']}/v1", api_key="x", max_retries=0, timeout=200
        ) as made,
    ):
        yield made


def arguments(**more):
    thinking = {"chat_template_kwargs": {"enable_thinking": more.pop("thinking", False)}}
    common = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 600}
    return {**common, "extra_body": thinking, **more}


@pytest.mark.parametrize(("choice", "finish"), [("required", "tool_calls"), (NAMED, "stop")])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_demanded_call(client, choice, finish, seed):
    given = arguments(tools=TOOLS, tool_choice=choice, parallel_tool_calls=False, seed=seed)
    whole = client.chat.completions.create(**given).choices[0]
    (call,) = whole.message.tool_calls
    assert (whole.finish_reason, whole.message.content) == (finish, None)
    if call.function.name == "log_reading":
        jsonschema.validate(json.loads(call.function.arguments), SCHEMA)
    else:
        assert choice == "required"
        assert isinstance(json.loads(call.function.arguments), dict)
    with client.chat.completions.stream(**given) as stream:
        final = stream.get_final_completion().choices[0]
    (streamed,) = final.message.tool_calls
    assert streamed.function.arguments == call.function.arguments
    assert (streamed.function.name, final.finish_reason) == (call.function.name, finish)


def test_several_choices_each_with_a_call(client):
    given = arguments(tools=TOOLS, tool_choice=NAMED, n=3, seed=4)
    answer = client.chat.completions.create(**given)
    calls = [choice.message.tool_calls[0] for choice in answer.choices]
    assert len({call.id for call in calls}) == 3
    for call in calls:
        jsonschema.validate(json.loads(call.function.arguments), SCHEMA)


FORM = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}


@pytest.mark.parametrize(
    "given", [{"response_format": FORM}, {"tools": TOOLS, "tool_choice": NAMED}]
)
def test_a_constraint_begins_where_reasoning_ends(client, given):
    """A bias ends the reasoning at its first token; inside the form that token cannot come."""
    bias = {str(END_OF_THINKING): 100}
    answer = client.chat.completions.create(
        **arguments(**given, thinking=True, logit_bias=bias, seed=5)
    )
    message = answer.choices[0].message
    text = message.tool_calls[0].function.arguments if "tools" in given else message.content
    jsonschema.validate(json.loads(text), SCHEMA)
    assert answer.usage.completion_tokens_details.reasoning_tokens == 1
    endless = client.chat.completions.create(
        **arguments(**given, thinking=True, logit_bias={str(END_OF_THINKING): -100}, max_tokens=20)
    )
    message = endless.choices[0].message
    assert endless.choices[0].finish_reason == "length"
    assert message.reasoning_content
    assert not message.content
    assert endless.usage.completion_tokens_details.reasoning_tokens == 20
