"""Reads and checks the tools of a request and its tool_choice."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from inferfleet_proto.v1 import inference_pb2
from services.common.errors import InvalidArgumentError
from services.common.text.tool_schema import schema_of

MAX_TOOLS = 128
MAX_ALL_CHARS = 512 * 1024
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_MODES = inference_pb2.ToolChoice


@dataclass(frozen=True)
class Tool:
    """One function that the model may call."""

    name: str
    schema: Mapping[str, Any]
    """JSON Schema of the arguments; always of type object."""
    strict: bool | None


@dataclass(frozen=True)
class ToolUse:
    """The tools that a request offers, and which calls it requires."""

    tools: tuple[Tool, ...]
    required: bool = False
    """At least one call is enforced."""
    named: str | None = None
    """The only tool that may be called; None for any."""
    parallel: bool = True
    """Whether several calls are allowed."""
    parsed: bool = True
    """Whether calls are parsed; otherwise they stay text."""

    @property
    def names(self) -> frozenset[str]:
        """The names of all tools."""
        return frozenset(tool.name for tool in self.tools)


def read_tools(chat: inference_pb2.Chat) -> ToolUse:
    """Read and check the tools of a chat and its tool_choice.

    Raises:
        InvalidArgumentError: naming the field that is wrong.
    """
    if len(chat.tools) > MAX_TOOLS:
        _refuse("chat.tools", f"at most {MAX_TOOLS}, got {len(chat.tools)}")
    size = sum(tool.ByteSize() for tool in chat.tools)
    if size > MAX_ALL_CHARS:
        _refuse("chat.tools", f"at most {MAX_ALL_CHARS} bytes together, got {size}")
    tools = tuple(_tool(index, tool) for index, tool in enumerate(chat.tools))
    names = [tool.name for tool in tools]
    for index, name in enumerate(names):
        if name in names[:index]:
            _refuse(f"chat.tools[{index}].name", f"{name!r} is already the name of another tool")
    mode = chat.tool_choice.mode
    if mode in (_MODES.MODE_REQUIRED, _MODES.MODE_NAMED) and not tools:
        _refuse("chat.tool_choice", "requires a call, but there are no tools")
    named = chat.tool_choice.name if mode == _MODES.MODE_NAMED else None
    if named is not None and named not in names:
        _refuse("chat.tool_choice.name", f"{named[:64]!r} is not the name of a tool")
    if mode not in _MODES.Mode.values():
        _refuse("chat.tool_choice.mode", f"{mode} is not a known mode")
    return ToolUse(
        tools,
        required=mode in (_MODES.MODE_REQUIRED, _MODES.MODE_NAMED),
        named=named,
        parallel=not chat.HasField("parallel_tool_calls") or chat.parallel_tool_calls,
        parsed=bool(tools) and mode != _MODES.MODE_NONE,
    )


def _tool(index: int, tool: inference_pb2.Tool) -> Tool:
    if not _NAME.fullmatch(tool.name):
        _refuse(
            f"chat.tools[{index}].name",
            f"must be 1 to 64 letters, digits, _ and -, got {tool.name[:64]!r}",
        )
    schema = schema_of(index, tool)
    if schema.get("type", "object") != "object":
        _refuse(f"chat.tools[{index}].parameters", "must be a schema of type object")
    if not schema.keys() & {"type", "$ref", "anyOf", "oneOf", "allOf", "enum", "const"}:
        schema = {"type": "object", **schema}
    return Tool(tool.name, schema, tool.strict if tool.HasField("strict") else None)


def _refuse(field: str, problem: str) -> NoReturn:
    raise InvalidArgumentError.for_field(field, problem)
