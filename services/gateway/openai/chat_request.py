"""/v1/chat/completions: parses the body into a GenerateRequest."""

from typing import Any

from inferfleet_proto.v1 import inference_pb2
from services.gateway.openai.fields import Fields, describe_value, refuse
from services.gateway.openai.parsed_body import ParsedBody
from services.gateway.openai.shared_fields import (
    IGNORED_FIELDS,
    MAX_INT,
    read_constraint,
    read_routing,
    read_sampling,
    read_stop,
    read_stream,
)
from services.gateway.openai.tool_fields import read_tools
from services.gateway.request.checks import MAX_CALLS, MAX_MESSAGES

_FUNCTION_CALL = ("function_call", "send it as tool_calls")
MAX_PARTS = 1024
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")


def parse_chat(body: Any) -> ParsedBody:
    """Parse a body.

    Raises:
        InvalidArgumentError: names the field that is invalid or not supported.
    """
    fields = Fields(body)
    request = inference_pb2.GenerateRequest(model=fields.text("model") or "")
    messages = fields.items("messages", MAX_MESSAGES)
    if not messages:
        refuse("messages", "must be a non-empty array")
    for index, message in enumerate(messages):
        _read_message(Fields(message, f"messages[{index}]"), request.chat.messages.add())
    _read_template(fields, request.chat)
    read_tools(fields, request.chat)
    _read_effort(fields, request.chat)
    read_sampling(fields, request)
    read_stop(fields, request)
    read_routing(fields, request)
    read_constraint(fields, request)
    _read_max_tokens(fields, request)
    logprobs = _read_logprobs(fields, request)
    stream, include_usage = read_stream(fields)
    if (fields.items("modalities", 8) or ["text"]) != ["text"]:
        refuse("modalities", "only text is supported")
    fields.ignore(*IGNORED_FIELDS)
    fields.refuse_unread()
    return ParsedBody((request,), stream, include_usage, logprobs)


def _read_message(fields: Fields, message: inference_pb2.ChatMessage) -> None:
    """Read a message; fields that nobody here knows are ignored.

    Clients send back what servers gave them, with labels of their own.
    """
    role = fields.text("role")
    if role not in ("system", "developer", "user", "assistant", "tool"):
        refuse(
            fields.name("role"),
            f"must be system, developer, user, assistant or tool, got {describe_value(role)}",
        )
    message.role = "system" if role == "developer" else role
    message.content = _content(fields)
    message.name = fields.text("name") or ""
    message.tool_call_id = fields.text("tool_call_id") or ""
    message.reasoning_content = _reasoning(fields)
    for index, call in enumerate(fields.items("tool_calls", MAX_CALLS) or []):
        inner = Fields(call, f"{fields.name('tool_calls')}[{index}]")
        _read_call(inner, message.tool_calls.add(index=index))
    if role == "tool" and not message.tool_call_id:
        refuse(
            fields.name("tool_call_id"), "is required: it names the call that this message answers"
        )
    if role == "assistant":
        _check_assistant(fields, message)


def _check_assistant(fields: Fields, message: inference_pb2.ChatMessage) -> None:
    """Refuse what would be lost, and a message without anything."""
    for name, advice in (("audio", "send its transcript as content"), _FUNCTION_CALL):
        if fields.value(name) is not None:
            refuse(fields.name(name), f"is not supported; {advice}", reason="UNSUPPORTED_FIELD")
    filled = message.content or message.tool_calls or message.reasoning_content
    if not filled and fields.value("content") is None:
        refuse(fields.name("content"), "is required, unless there are tool_calls or a refusal")


def _reasoning(fields: Fields) -> str:
    """`reasoning_content`, or `reasoning`, as other servers name it, if that is a text."""
    own = fields.text("reasoning_content")
    other = fields.value("reasoning")
    return own or (other if isinstance(other, str) else "")


def _content(fields: Fields) -> str:
    """The text of a message; a refusal is what an assistant said instead."""
    content = fields.value("content")
    if content is None:
        return fields.text("refusal") or ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        refuse(fields.name("content"), f"must be a string or parts, got {describe_value(content)}")
    if len(content) > MAX_PARTS:
        refuse(fields.name("content"), f"at most {MAX_PARTS} parts, got {len(content)}")
    texts = []
    for index, item in enumerate(content):
        part = Fields(item, f"{fields.name('content')}[{index}]")
        kind = part.text("type")
        if kind not in ("text", "refusal"):
            refuse(part.name("type"), f"only text parts are supported, got {describe_value(kind)}")
        texts.append(part.text(kind) or "")
    return "".join(texts)


def _read_call(fields: Fields, call: inference_pb2.ToolCall) -> None:
    """Read an earlier call. Its arguments may be any text: an answer can be cut inside them."""
    call.id = fields.text("id") or ""
    function = fields.nested("function")
    if function is None:
        refuse(fields.name("function"), "is required")
    call.name = function.text("name") or ""
    call.arguments = function.text("arguments") or ""


def _read_template(fields: Fields, chat: inference_pb2.Chat) -> None:
    args = fields.value("chat_template_kwargs")
    if args is not None and not isinstance(args, dict):
        refuse("chat_template_kwargs", f"must be an object, got {describe_value(args)}")
    try:
        chat.template_args.update(args or {})
    except (TypeError, ValueError, OverflowError) as error:
        refuse("chat_template_kwargs", str(error))
    prompt = fields.boolean("add_generation_prompt")
    if prompt is not None:
        chat.template_args["add_generation_prompt"] = prompt


def _read_effort(fields: Fields, chat: inference_pb2.Chat) -> None:
    """Set variables of the chat template; their effect depends on the model."""
    effort = fields.text("reasoning_effort")
    if effort is None:
        return
    if effort not in EFFORTS:
        refuse(
            "reasoning_effort", f"must be one of {', '.join(EFFORTS)}, got {describe_value(effort)}"
        )
    if "reasoning_effort" not in chat.template_args:
        chat.template_args["reasoning_effort"] = effort
    if effort == "none" and "enable_thinking" not in chat.template_args:
        chat.template_args["enable_thinking"] = False


def _read_max_tokens(fields: Fields, request: inference_pb2.GenerateRequest) -> None:
    newer = fields.integer("max_completion_tokens", 1, MAX_INT)
    older = fields.integer("max_tokens", 1, MAX_INT)
    if newer is not None and older is not None and newer != older:
        refuse("max_tokens", "must be equal to max_completion_tokens if both are set")
    most = older if newer is None else newer
    if most is not None:
        request.stop.max_tokens = most


def _read_logprobs(fields: Fields, request: inference_pb2.GenerateRequest) -> bool:
    wanted = bool(fields.boolean("logprobs"))
    top = fields.integer("top_logprobs", 0, 20)
    if top and not wanted:
        refuse("top_logprobs", "requires logprobs: true")
    request.response.logprobs = wanted
    if top is not None:
        request.response.top_logprobs = top
    return wanted
