"""Each public field that a caller can make large has a bound in the operators' table."""

import dataclasses
import re
from pathlib import Path

import pytest
from google.protobuf.descriptor import FieldDescriptor

from inferfleet_proto.v1 import inference_pb2
from services.common.errors import InvalidArgumentError
from services.gateway.config import GatewayConfig
from services.gateway.openai.chat_request import MAX_PARTS, parse_chat
from services.gateway.openai.completion_request import MAX_PROMPT_IDS, parse_completion
from services.gateway.openai.fields import Fields
from services.gateway.request.checks import check_request

PAGE = (Path(__file__).parents[2] / "docs" / "gateway-operations.md").read_text()
BOUNDS = PAGE.split("\n## Bounds\n")[1].split("\n## ")[0]
WHOLE, CONTRACT, HTTP = re.split(r"\n(?=Fields of )", BOUNDS)
REQUESTS = ("GenerateRequest", "TokenizeRequest", "DetokenizeRequest", "ListModelsRequest")


def named(part, column=0):
    """The names in backticks of a column, without the heading of the table."""
    rows = [line.split(" | ") for line in part.splitlines() if line.startswith("| ")][1:]
    return {name for row in rows for name in re.findall(r"`([^`]+)`", row[column])}


def sized(message, path=""):
    """The paths of all fields whose size the caller chooses."""
    for field in message.fields:
        name = f"{path}{field.name}"
        inner = field.message_type if field.type == FieldDescriptor.TYPE_MESSAGE else None
        opaque = inner is not None and (
            inner.full_name.startswith("google.") or inner.GetOptions().map_entry
        )
        texts = field.type in (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES)
        if texts or opaque or field.is_repeated:
            yield name
        if inner is not None and not opaque:
            yield from sized(inner, f"{name}.")


def test_each_field_of_the_contract_has_a_bound():
    messages = inference_pb2.DESCRIPTOR.message_types_by_name
    found = {name for kind in REQUESTS for name in sized(messages[kind])}
    assert found == named(CONTRACT)


FUNCTION = {"name": "f", "description": "d", "parameters": {}, "strict": True}
CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
CHAT = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
SCHEMA = {"type": "json_schema", "json_schema": {"schema": {}}}
BODIES = [
    (parse_completion, {"model": "m", "prompt": "x", "structured_outputs": {"regex": "a"}}),
    (
        parse_chat,
        {**CHAT, "response_format": {"type": "json_schema", "json_schema": {"schema": {}}}},
    ),
    (
        parse_chat,
        {
            "model": "m",
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "a"}]},
                {"role": "assistant", "tool_calls": [CALL]},
            ],
            "tools": [{"type": "function", "function": FUNCTION}],
            "tool_choice": {"type": "function", "function": {"name": "f"}},
            "stream": True,
            "stream_options": {"include_usage": True},
        },
    ),
]


def test_each_field_of_the_http_bodies_has_a_bound(monkeypatch):
    read, fixed = set(), set()

    def record(method, names):
        original = getattr(Fields, method)

        def recording(self, *fields):
            texts = [field for field in fields if isinstance(field, str)]
            names.update(self.name(field) for field in texts)
            return original(self, *fields)

        monkeypatch.setattr(Fields, method, recording)

    for method in ("value", "ignore"):
        record(method, read)
    for method in ("boolean", "number", "integer", "nested"):
        record(method, fixed)
    for parse, body in BODIES:
        parse(body)
    tops = {re.split(r"[.\[]", name)[0] for name in read - fixed}
    # What is inside of these has the contract's bounds.
    assert tops - {"stream_options"} == named(HTTP)


def test_each_option_of_the_table_exists_and_has_the_value_that_is_named():
    options = named(WHOLE, column=3)
    known = {field.name: field.default for field in dataclasses.fields(GatewayConfig)}
    assert options <= known.keys()
    for line in WHOLE.splitlines():
        cells = line.strip("| ").split(" | ")
        for option in re.findall(r"`([^`]+)`", cells[-1]):
            if isinstance(known.get(option), int | float):
                number = f"{known[option]:g}"
                assert re.search(rf"\b{number}\b", line), f"{option} is {number}"


LONG = "x" * 257
HUGE = {"x": "y" * 70_000}


@pytest.mark.parametrize(
    ("field", "chat"),
    [
        ("chat.messages[1].role", {"messages": [{}, {"role": LONG}]}),
        ("chat.messages[0].name", {"messages": [{"name": LONG}]}),
        ("chat.messages[0].tool_call_id", {"messages": [{"tool_call_id": LONG}]}),
        ("chat.messages[0].tool_calls", {"messages": [{"tool_calls": [{}] * 129}]}),
        ("chat.messages[0].tool_calls[0].id", {"messages": [{"tool_calls": [{"id": LONG}]}]}),
        (
            "chat.messages[0].tool_calls[1].name",
            {"messages": [{"tool_calls": [{}, {"name": LONG}]}]},
        ),
        ("chat.tools[0].description", {"tools": [{"description": LONG * 256}]}),
        ("chat.tools[0].parameters", {"tools": [{"parameters": HUGE}]}),
        ("chat.template_args", {"template_args": HUGE}),
        ("chat.tool_choice.name", {"tool_choice": {"name": LONG}}),
    ],
)
def test_absurd_parts_of_a_chat_are_refused(field, chat):
    with pytest.raises(InvalidArgumentError) as caught:
        check_request(inference_pb2.GenerateRequest(chat=chat), vocab_size=10)
    assert caught.value.violations[0].field == field
    assert "at most" in caught.value.message


def test_an_absurd_session_is_refused():
    request = inference_pb2.GenerateRequest(text="a", routing={"session_id": LONG})
    with pytest.raises(InvalidArgumentError, match=r"routing\.session_id: at most 256"):
        check_request(request, vocab_size=10)


def test_absurd_http_bodies_are_refused():
    parts = [{"type": "text", "text": "a"}] * (MAX_PARTS + 1)
    with pytest.raises(InvalidArgumentError, match=r"messages\[0\]\.content: at most 1024 parts"):
        parse_chat({"model": "m", "messages": [{"role": "user", "content": parts}]})
    prompts = [[1] * 50_000] * (MAX_PROMPT_IDS // 50_000) + [[1]]
    with pytest.raises(InvalidArgumentError, match="prompt: at most 1000000 token ids"):
        parse_completion({"model": "m", "prompt": prompts})
