"""Parses `tools`, `tool_choice` and `parallel_tool_calls`."""

from typing import Any

import msgspec

from inferfleet_proto.v1 import inference_pb2
from services.gateway.answers.tools import MAX_TOOLS
from services.gateway.openai.fields import Fields, describe_value, refuse

_Choice = inference_pb2.ToolChoice
_MODES = {
    "auto": _Choice.MODE_AUTO,
    "none": _Choice.MODE_NONE,
    "required": _Choice.MODE_REQUIRED,
}


def read_tools(fields: Fields, chat: inference_pb2.Chat) -> None:
    """Fill `chat.tools`, `chat.tool_choice` and `chat.parallel_tool_calls`.

    Raises:
        InvalidArgumentError: names the field that is invalid or not supported.
    """
    for index, item in enumerate(fields.items("tools", MAX_TOOLS) or []):
        _read_tool(Fields(item, f"tools[{index}]"), chat.tools.add())
    choice = fields.value("tool_choice")
    if choice is not None:
        _read_choice(choice, chat.tool_choice)
    parallel = fields.boolean("parallel_tool_calls")
    if parallel is not None:
        chat.parallel_tool_calls = parallel


def _read_tool(fields: Fields, tool: inference_pb2.Tool) -> None:
    _only_functions(fields)
    function = fields.nested("function")
    if function is None:
        refuse(fields.name("function"), "is required")
    name = function.text("name")
    if not name:
        refuse(function.name("name"), "is required")
    tool.name = name
    tool.description = function.text("description") or ""
    parameters = function.value("parameters")
    if parameters is not None:
        if not isinstance(parameters, dict):
            problem = f"must be a JSON Schema, got {describe_value(parameters)}"
            refuse(function.name("parameters"), problem)
        # As text, because a Struct would lose the order of the properties.
        tool.parameters_json = msgspec.json.encode(parameters).decode()
    strict = function.boolean("strict")
    if strict is not None:
        tool.strict = strict
    function.refuse_unread()
    fields.refuse_unread()


def _read_choice(choice: Any, target: inference_pb2.ToolChoice) -> None:
    if isinstance(choice, str):
        if choice not in _MODES:
            known = "auto, none, required or an object that names a function"
            refuse("tool_choice", f"must be {known}, got {describe_value(choice)}")
        target.mode = _MODES[choice]
        return
    fields = Fields(choice, "tool_choice")
    _only_functions(fields)
    function = fields.nested("function")
    name = function.text("name") if function is not None else None
    if function is None or not name:
        refuse("tool_choice.function.name", "is required")
    function.refuse_unread()
    fields.refuse_unread()
    target.mode = _Choice.MODE_NAMED
    target.name = name


def _only_functions(fields: Fields) -> None:
    kind = fields.text("type")
    if kind != "function":
        refuse(
            fields.name("type"),
            f"only function is supported, got {describe_value(kind)}",
            reason="UNSUPPORTED_FIELD",
        )
