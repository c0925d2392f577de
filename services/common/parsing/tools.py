"""The tools of a request and what may be done with them, checked."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from google.protobuf import json_format

from inferfleet.v1 import inference_pb2
from services.common.errors import InvalidArgumentError

MAX_TOOLS = 128
MAX_SCHEMA_CHARS = 64 * 1024
MAX_ALL_CHARS = 512 * 1024
MAX_DEPTH = 64
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_MODES = inference_pb2.ToolChoice


@dataclass(frozen=True)
class Tool:
    """One function."""

    name: str
    schema: Mapping[str, Any]
    """Of its arguments; always an object's."""
    strict: bool | None


@dataclass(frozen=True)
class ToolUse:
    """What a request offers and demands."""

    tools: tuple[Tool, ...]
    required: bool = False
    """At least one call, enforced."""
    named: str = ""
    """The one tool to call; "" for any."""
    parallel: bool = True
    parsed: bool = True
    """False: what looks like a call stays text."""

    @property
    def names(self) -> frozenset[str]:
        """Of all tools."""
        return frozenset(tool.name for tool in self.tools)


def read_tools(chat: inference_pb2.Chat) -> ToolUse:
    """Understand the tools of a chat and its choice.

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
            _refuse(f"chat.tools[{index}].name", f"{name!r} is there twice")
    mode = chat.tool_choice.mode
    if mode in (_MODES.MODE_REQUIRED, _MODES.MODE_NAMED) and not tools:
        _refuse("chat.tool_choice", "there are no tools to call")
    named = chat.tool_choice.name if mode == _MODES.MODE_NAMED else ""
    if mode == _MODES.MODE_NAMED and named not in names:
        _refuse("chat.tool_choice.name", f"{named[:64]!r} is none of the tools")
    if mode not in _MODES.Mode.values():
        _refuse("chat.tool_choice.mode", f"{mode} is not known")
    return ToolUse(
        tools,
        required=mode in (_MODES.MODE_REQUIRED, _MODES.MODE_NAMED),
        named=named,
        parallel=not chat.HasField("parallel_tool_calls") or chat.parallel_tool_calls,
        parsed=bool(tools) and mode != _MODES.MODE_NONE,
    )


def schema_of(index: int, tool: inference_pb2.Tool) -> dict[str, Any]:
    """A tool's schema as the caller wrote it; {} without one.

    Raises:
        InvalidArgumentError: it is no JSON object.
    """
    field = f"chat.tools[{index}].parameters"
    if not tool.parameters_json:
        schema: dict[str, Any] = plain(json_format.MessageToDict(tool.parameters))
        return schema
    if tool.HasField("parameters"):
        _refuse(f"{field}_json", "cannot be had together with parameters")
    if len(tool.parameters_json) > MAX_SCHEMA_CHARS:
        _refuse(field, f"at most {MAX_SCHEMA_CHARS} characters")
    try:
        schema = json.loads(tool.parameters_json)
    except (ValueError, RecursionError) as error:
        _refuse(field, f"is not JSON: {str(error)[:100]}")
    if not isinstance(schema, dict):
        _refuse(field, "must be a JSON object")
    if _deeper(schema, MAX_DEPTH):
        _refuse(field, f"is nested deeper than {MAX_DEPTH}")
    return schema


def plain(value: Any) -> Any:
    """A Struct's content with whole numbers as such and keys in order: its map has none, and equal
    requests must render to equal text, or no prefix would ever be found again."""
    if isinstance(value, dict):
        return {key: plain(value[key]) for key in sorted(value)}
    if isinstance(value, list):
        return [plain(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


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


def _deeper(value: Any, most: int) -> bool:
    """Whether a value is nested deeper than that: what is made of it later may recurse."""
    level = [value]
    for _ in range(most):
        inner = (list(v.values()) if isinstance(v, dict) else v for v in level)
        level = [member for v in inner if isinstance(v, list) for member in v]
        if not level:
            return False
    return True


def _refuse(field: str, problem: str) -> NoReturn:
    raise InvalidArgumentError.for_field(field, problem)
