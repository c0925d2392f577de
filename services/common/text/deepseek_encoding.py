"""Prompts of DeepSeek V4 models, which have no chat template: DeepSeek's library renders them.

The library also makes the token ids, so that text that spells a special token remains text.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from services.common.errors import InvalidArgumentError
from services.common.text.assets import TextAssets
from services.common.text.deepseek_recipe import MARK, recipe

_EFFORTS = {
    "minimal": "low",
    "low": "low",
    "medium": "high",
    "high": "high",
    "xhigh": "xhigh",
    "max": "max",
}
_KNOWN_ARGS = frozenset({"enable_thinking", "thinking", "reasoning_effort"})


class DeepseekEncoding:
    """Replaces a ChatTemplate. The library is loaded with the first chat."""

    problem = ""
    source = ""
    uses_tools = True

    def __init__(self, assets: TextAssets) -> None:
        self._tokenizer_json = assets.tokenizer_json.decode()
        # V4.1 has a token of its own before the system's text.
        self._newer = "<｜System｜>" in _added_tokens(assets)
        self._tokenizer: Any = None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_args: Mapping[str, Any] | None = None,
    ) -> str:
        """The text of a conversation, as ChatTemplate.render.

        Raises:
            InvalidArgumentError: on `chat`.
            UnimplementedError: the library is not installed.
        """
        conversation = _conversation(messages, tools or (), dict(template_args or {}))
        prompt: str = self._encoding().render_conversation(conversation).prompt
        return prompt

    def encode(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_args: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """The token ids of the same; raises the same."""
        if self._tokenizer is None:
            self._tokenizer = recipe().Tokenizer.from_str(self._tokenizer_json)
        conversation = _conversation(messages, tools or (), dict(template_args or {}))
        encoding = self._encoding().with_tokenizer(self._tokenizer)
        return list(encoding.encode(conversation))

    def _encoding(self) -> Any:
        library = recipe()
        return library.DeepseekV41Encoding() if self._newer else library.DeepseekV4Encoding()


def is_deepseek_v4(assets: TextAssets) -> bool:
    """Whether the assets are those of a DeepSeek V4 model: no template, and DSML tokens."""
    return not assets.chat_template and MARK in _added_tokens(assets)


def _added_tokens(assets: TextAssets) -> frozenset[str]:
    added = json.loads(assets.tokenizer_json).get("added_tokens") or ()
    return frozenset(str(token.get("content")) for token in added)


def _conversation(
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]],
    args: dict[str, Any],
) -> Any:
    for name in args:
        if name not in _KNOWN_ARGS:
            _refuse("chat.template_args", f"{name} is not supported by this model's encoding")
    library = recipe()
    effort = args.get("reasoning_effort")
    thinking = args.get("enable_thinking", args.get("thinking", effort != "none"))
    try:
        return library.Conversation(
            [_message(library, message) for message in messages],
            thinking_mode=bool(thinking),
            reasoning_effort=_EFFORTS.get(effort) if effort and thinking else None,
            tools=[_tool(library, tool["function"]) for tool in tools] or None,
        )
    except (TypeError, ValueError) as error:
        _refuse("chat", f"the model's encoding refuses it: {error}")


def _message(library: Any, message: Mapping[str, Any]) -> Any:
    role, content = message["role"], message["content"]
    if role == "assistant":
        calls = [_call(library, call) for call in message.get("tool_calls", ())]
        return library.AssistantMessage(content, message.get("reasoning_content"), calls or None)
    if role == "tool":
        return library.ToolMessage(content, message.get("tool_call_id"))
    kind = library.UserMessage if role == "user" else library.SystemMessage
    return kind(content)


def _call(library: Any, call: Mapping[str, Any]) -> Any:
    function = call["function"]
    arguments = function["arguments"]
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return library.ToolCall(call["id"], function["name"], text)


def _tool(library: Any, function: Mapping[str, Any]) -> Any:
    return library.ToolDefinition(
        function["name"], function["description"] or None, function["parameters"]
    )


def _refuse(field: str, problem: str) -> NoReturn:
    raise InvalidArgumentError.for_field(field, problem, reason="CHAT_TEMPLATE")
