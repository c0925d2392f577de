"""Converts Python arguments to the contract's request. Fields that are not given stay unset."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from inferfleet_proto.v1 import inference_pb2 as pb

Message = Mapping[str, Any]
"""A dict with `role`, `content` and the other fields of the contract's ChatMessage."""


class GenerateParams(TypedDict, total=False):
    """The options of a request, named as in protos/inferfleet/v1; prompt and model are separate."""

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int
    n: int
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    logit_bias: Mapping[int, float]
    allowed_token_ids: Sequence[int]
    bad_token_ids: Sequence[int]
    max_tokens: int
    min_tokens: int
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    include_stop_in_output: bool
    json_schema: str
    json_object: bool
    regex: str
    ebnf: str
    choice: Sequence[str]
    structural_tag: str
    logprobs: bool
    top_logprobs: int
    prompt_logprobs: bool
    echo: bool
    no_text: bool
    stream_interval: int
    keep_special_tokens: bool
    parse_special_tokens: bool
    template_args: Mapping[str, Any]
    tools: Sequence[Mapping[str, Any]]
    tool_choice: str
    parallel_tool_calls: bool
    session_id: str
    priority: int
    expected_output_tokens: int
    bypass_cache: bool
    request_id: str


_CHAT_PARAMS = frozenset({"template_args", "tools", "tool_choice", "parallel_tool_calls"})
_MODES = {
    "auto": pb.ToolChoice.MODE_AUTO,
    "none": pb.ToolChoice.MODE_NONE,
    "required": pb.ToolChoice.MODE_REQUIRED,
}
_FIELDS_OF: dict[str, frozenset[str]] = {
    "sampling": frozenset(pb.SamplingParams.DESCRIPTOR.fields_by_name),
    "stop": frozenset(pb.StopParams.DESCRIPTOR.fields_by_name),
    "constraint": frozenset(pb.Constraint.DESCRIPTOR.fields_by_name),
    "response": frozenset(pb.ResponseOptions.DESCRIPTOR.fields_by_name),
    "routing": frozenset(pb.RoutingHints.DESCRIPTOR.fields_by_name),
}


def build_request(
    model: str,
    prompt: str | None,
    messages: Sequence[Message] | None,
    token_ids: Sequence[int] | None,
    params: GenerateParams,
) -> pb.GenerateRequest:
    """Build the request message.

    Raises:
        ValueError: not exactly one of the three prompts is given, or a number is out of range.
        TypeError: a parameter is unknown, or its value has the wrong type.
    """
    if sum(given is not None for given in (prompt, messages, token_ids)) != 1:
        raise ValueError("give exactly one of prompt, messages and token_ids")
    request = pb.GenerateRequest(model=model)
    if prompt is not None:
        request.text = prompt
    elif messages is not None:
        request.chat.CopyFrom(chat_of(messages, params.get("template_args")))
        _add_tools(request.chat, params)
    else:
        request.token_ids.ids.extend(token_ids or ())
        request.token_ids.SetInParent()
    for name, value in params.items():
        if value is not None and name not in _CHAT_PARAMS:
            _set_param(request, name, value)
    return request


def chat_of(messages: Sequence[Message], template_args: Mapping[str, Any] | None) -> pb.Chat:
    """Convert a conversation to the contract's Chat."""
    chat = pb.Chat(messages=[pb.ChatMessage(**message) for message in messages])
    chat.template_args.update(dict(template_args or {}))
    return chat


def _add_tools(chat: pb.Chat, params: GenerateParams) -> None:
    """Add tools and tool choice.

    A tool has the OpenAI form, {"type": "function", "function": {…}}, or is the inner part alone.
    `tool_choice` is "auto", "none", "required" or the name of a tool.
    """
    for tool in params.get("tools") or ():
        function = tool.get("function", tool)
        added = chat.tools.add(name=function["name"], description=function.get("description", ""))
        if function.get("parameters") is not None:
            added.parameters_json = json.dumps(function["parameters"], ensure_ascii=False)
        if function.get("strict") is not None:
            added.strict = function["strict"]
    choice = params.get("tool_choice")
    if choice in _MODES:
        chat.tool_choice.mode = _MODES[choice]
    elif choice is not None:
        chat.tool_choice.mode = pb.ToolChoice.MODE_NAMED
        chat.tool_choice.name = choice
    parallel = params.get("parallel_tool_calls")
    if parallel is not None:
        chat.parallel_tool_calls = parallel


def _set_param(request: pb.GenerateRequest, name: str, value: Any) -> None:
    if name == "request_id":
        request.request_id = value
    elif name == "parse_special_tokens":
        request.parse_special_tokens = value
    elif name == "bypass_cache":
        request.cache.bypass = value
    elif name == "stop":
        request.stop.stop_strings.extend([value] if isinstance(value, str) else value)
    elif name == "choice":
        request.constraint.choice.texts.extend(value)
    else:
        group = next((group for group, names in _FIELDS_OF.items() if name in names), None)
        if group is None:
            raise TypeError(f"unknown parameter {name!r}")
        _assign(getattr(request, group), name, value)


def _assign(message: Any, name: str, value: Any) -> None:
    if isinstance(value, Mapping):
        getattr(message, name).update(value)
    elif isinstance(value, str | bytes | int | float):
        setattr(message, name, value)
    else:
        getattr(message, name).extend(value)
