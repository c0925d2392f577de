"""The JSON Schema of a tool's arguments, as the caller wrote it.

Chat templates render it, and the gateway checks it.
"""

import json
from typing import Any, NoReturn

from google.protobuf import json_format

from inferfleet_proto.v1 import inference_pb2
from services.common.errors import InvalidArgumentError

MAX_SCHEMA_CHARS = 64 * 1024
MAX_DEPTH = 64


def schema_of(index: int, tool: inference_pb2.Tool) -> dict[str, Any]:
    """A tool's schema as the caller wrote it; {} without one.

    Raises:
        InvalidArgumentError: the schema is not a JSON object, too long or nested too deeply.
    """
    field = f"chat.tools[{index}].parameters"
    if not tool.parameters_json:
        schema: dict[str, Any] = plain(json_format.MessageToDict(tool.parameters))
        return schema
    if tool.HasField("parameters"):
        _refuse(f"{field}_json", "cannot be combined with parameters")
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
    """The content of a Struct, with integers as such and keys sorted.

    A Struct's map has no order, and equal requests must render to equal text, because the prefix
    cache would not find them otherwise.
    """
    if isinstance(value, dict):
        return {key: plain(value[key]) for key in sorted(value)}
    if isinstance(value, list):
        return [plain(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _deeper(value: Any, most: int) -> bool:
    """Whether a value is nested deeper than `most`; later code may recurse over it."""
    level = [value]
    for _ in range(most):
        inner = (list(v.values()) if isinstance(v, dict) else v for v in level)
        level = [member for v in inner if isinstance(v, list) for member in v]
        if not level:
            return False
    return True


def _refuse(field: str, problem: str) -> NoReturn:
    raise InvalidArgumentError.for_field(field, problem)
