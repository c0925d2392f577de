"""Tools and calls as plain messages, for chat templates that do not support tools.

The format is the one that Hermes models were trained on and that the gateway's Hermes parser reads.
A constraint can make other models use it too. `with_text_arguments` adapts messages to templates
that expect arguments as text.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from services.common.text.deepseek_marks import LIST

_BEFORE_TOOLS = (
    "You can call functions. Each line between <tools> and </tools> describes one, "
    "with a JSON Schema of its arguments:\n<tools>\n"
)
_AFTER_TOOLS = (
    "\n</tools>\n"
    "To call one, write a JSON object with its name and its arguments between tags:\n"
    '<tool_call>\n{"name": "…", "arguments": {…}}\n</tool_call>'
)

_ARGUMENTS_AS_JSON = re.compile(r"arguments['\"\]]*\s*\|\s*tojson")


def in_messages(
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]],
    mark: Callable[[str], str] = str,
) -> list[Mapping[str, Any]]:
    """Convert messages so that tools, calls and results are part of their content.

    Args:
        mark: applied to the text that is not the caller's.
    """
    converted = [_convert(message, mark) for message in messages]
    if not tools:
        return converted
    lines = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    introduction = f"{mark(_BEFORE_TOOLS)}{lines}{mark(_AFTER_TOOLS)}"
    if converted and converted[0]["role"] in ("system", "developer"):
        first = {**converted[0], "content": f"{converted[0]['content']}\n\n{introduction}"}
        return [first, *converted[1:]]
    return [{"role": "system", "content": introduction}, *converted]


def _convert(message: Mapping[str, Any], mark: Callable[[str], str]) -> Mapping[str, Any]:
    if message["role"] == "tool":
        begin, end = mark("<tool_response>\n"), mark("\n</tool_response>")
        answer = f"{begin}{message['content']}{end}"
        return {"role": "user", "content": answer}
    calls = message.get("tool_calls")
    if not calls:
        return message
    parts = [message["content"]] if message["content"] else []
    for call in calls:
        function = json.dumps(call["function"], ensure_ascii=False)
        parts.append(mark("<tool_call>\n") + function + mark("\n</tool_call>"))
    rest = {key: value for key, value in message.items() if key != "tool_calls"}
    return {**rest, "content": "\n".join(parts)}


def takes_text_arguments(template: str) -> bool:
    """Whether a template inserts the arguments of past calls as text, as DeepSeek's do.

    Other templates expect parsed arguments.
    """
    return LIST in template and not _ARGUMENTS_AS_JSON.search(template)


def with_text_arguments(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """The message for such a template, which expects None for an empty text beside calls."""
    calls = message.get("tool_calls")
    if not calls:
        return message
    return {
        **message,
        "content": message["content"] or None,
        "tool_calls": [_text_call(call) for call in calls],
    }


def _text_call(call: Mapping[str, Any]) -> Mapping[str, Any]:
    function = call["function"]
    arguments = function["arguments"]
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return {**call, "function": {**function, "arguments": arguments}}
