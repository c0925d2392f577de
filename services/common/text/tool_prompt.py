"""Tools and calls as plain messages, for chat templates that know none of them.

The form is the one that Hermes models were trained on and that `parsing.hermes` reads: a model that
never saw it can still be held to it by a constraint.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

_INTRODUCTION = (
    "You can call functions. Each line between <tools> and </tools> describes one, "
    "with a JSON Schema of its arguments:\n<tools>\n{tools}\n</tools>\n"
    "To call one, write a JSON object with its name and its arguments between tags:\n"
    '<tool_call>\n{{"name": "…", "arguments": {{…}}}}\n</tool_call>'
)


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
