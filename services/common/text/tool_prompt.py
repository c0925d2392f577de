"""Tools and calls as plain messages, for chat templates that know none of them; and what templates
with ways of their own want.

The form is the one that Hermes models were trained on and that the gateway's Hermes parser reads:
a model that never saw it can still be held to it by a constraint.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from services.common.text.deepseek_marks import LIST

_INTRODUCTION = (
    "You can call functions. Each line between <tools> and </tools> describes one, "
    "with a JSON Schema of its arguments:\n<tools>\n{tools}\n</tools>\n"
    "To call one, write a JSON object with its name and its arguments between tags:\n"
    '<tool_call>\n{{"name": "…", "arguments": {{…}}}}\n</tool_call>'
)

_ARGUMENTS_AS_JSON = re.compile(r"arguments['\"\]]*\s*\|\s*tojson")


def in_messages(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
) -> list[Mapping[str, Any]]:
    """The messages with everything about tools said in their content."""
    said = [_said(message) for message in messages]
    if not tools:
        return said
    lines = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    introduction = _INTRODUCTION.format(tools=lines)
    if said and said[0]["role"] in ("system", "developer"):
        first = {**said[0], "content": f"{said[0]['content']}\n\n{introduction}"}
        return [first, *said[1:]]
    return [{"role": "system", "content": introduction}, *said]


def _said(message: Mapping[str, Any]) -> Mapping[str, Any]:
    if message["role"] == "tool":
        answer = f"<tool_response>\n{message['content']}\n</tool_response>"
        return {"role": "user", "content": answer}
    calls = message.get("tool_calls")
    if not calls:
        return message
    parts = [message["content"]] if message["content"] else []
    for call in calls:
        function = json.dumps(call["function"], ensure_ascii=False)
        parts.append(f"<tool_call>\n{function}\n</tool_call>")
    rest = {key: value for key, value in message.items() if key != "tool_calls"}
    return {**rest, "content": "\n".join(parts)}


def takes_text_arguments(template: str) -> bool:
    """Whether a template joins the arguments of past calls to its text as they are: DeepSeek's do.
    Others want them parsed."""
    return LIST in template and not _ARGUMENTS_AS_JSON.search(template)


def with_text_arguments(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """A message for such a template, to which no text beside calls is None."""
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
