"""Reading tools and tool_choice: each error names its field."""

import json

import pytest

from inferfleet_proto.v1 import inference_pb2 as pb
from services.common.errors import InvalidArgumentError
from services.common.text.tool_schema import MAX_DEPTH
from services.gateway.answers.tools import read_tools


def nested(levels):
    """A tool whose schema has this many levels."""
    text = '{"a":' * levels + "1" + "}" * levels
    return pb.Chat(tools=[pb.Tool(name="f", parameters_json=text)])


def test_the_depth_of_a_schema():
    assert read_tools(nested(MAX_DEPTH - 1)).tools
    for levels in (MAX_DEPTH + 1, 900):
        with pytest.raises(InvalidArgumentError, match=r"chat\.tools\[0\]\.parameters"):
            read_tools(nested(levels))


@pytest.mark.parametrize(
    ("tools", "choice", "field"),
    [
        ([{"name": ""}], {}, "chat.tools[0].name"),
        ([{"name": "x" * 65}], {}, "chat.tools[0].name"),
        ([{"name": "f"}, {"name": "f"}], {}, "chat.tools[1].name"),
        ([{"name": "f", "parameters_json": "{"}], {}, "chat.tools[0].parameters"),
        ([{"name": "f", "parameters_json": "[" * 9999}], {}, "chat.tools[0].parameters"),
        ([{"name": "f", "parameters_json": '{"type": "string"}'}], {}, "chat.tools[0].parameters"),
        ([{"name": "f", "parameters_json": " " * 70_000}], {}, "chat.tools[0].parameters"),
        (
            [{"name": "f", "parameters_json": "{}", "parameters": {}}],
            {},
            "chat.tools[0].parameters_json",
        ),
        ([{"name": f"f{i}"} for i in range(129)], {}, "chat.tools"),
        ([{"name": f"f{i}", "description": "x" * 60_000} for i in range(9)], {}, "chat.tools"),
        ([], {"mode": "MODE_REQUIRED"}, "chat.tool_choice"),
        ([], {"mode": "MODE_NAMED", "name": "f"}, "chat.tool_choice"),
        ([{"name": "f"}], {"mode": "MODE_NAMED"}, "chat.tool_choice.name"),
        ([{"name": "f"}], {"mode": 9}, "chat.tool_choice.mode"),
    ],
)
def test_errors(tools, choice, field):
    with pytest.raises(InvalidArgumentError) as caught:
        read_tools(pb.Chat(tools=tools, tool_choice=choice))
    assert caught.value.violations[0].field == field


def test_defaults():
    chat = pb.Chat(tools=[{"name": "f"}, {"name": "g", "parameters_json": '{"properties": {}}'}])
    use = read_tools(chat)
    assert (use.required, use.named, use.parallel, use.parsed) == (False, None, True, True)
    assert [tool.schema["type"] for tool in use.tools] == ["object", "object"]
    assert [tool.strict for tool in use.tools] == [None, None]
    assert not read_tools(pb.Chat()).parsed


def test_the_order_of_a_schema_s_keys_is_kept():
    text = json.dumps({"type": "object", "properties": {"z": {}, "a": {}}})
    (tool,) = read_tools(pb.Chat(tools=[{"name": "f", "parameters_json": text}])).tools
    assert list(tool.schema["properties"]) == ["z", "a"]
