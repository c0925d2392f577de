"""Checks a request by itself, before any costly work.

The bounds are those of the public contract. The engine checks again, because it may be called
without a gateway.
"""

import re
from collections.abc import Collection, Iterable
from typing import NoReturn

from inferfleet_proto.v1 import inference_pb2
from services.common.errors import InvalidArgumentError
from services.common.request_limits import (
    MAX_TOKENS_RANGE,
    SAMPLING_RANGES,
    TOP_LOGPROBS_RANGE,
    check_between,
    check_logit_bias,
    check_stop_strings,
    min_tokens_range,
)
from services.gateway.answers.tools import MAX_TOOLS

MAX_CHOICE_TEXTS = 1000
MAX_CONSTRAINT_CHARS = 64 * 1024
MAX_MESSAGES = 4096
MAX_CALLS = 128
"""In one message."""
MAX_NAME_CHARS = 256
"""Of a name or an id."""
MAX_DESCRIPTION_CHARS = 64 * 1024
MAX_STRUCT_BYTES = 64 * 1024
# Of Tokenize. Its answer holds the text and up to 4 bytes for each byte of it, and must be shorter
# than a message may be. No text of a usual language has as many bytes in a token as the second.
MAX_TOKENIZED_BYTES = 3 * 1024 * 1024
MAX_TOKENIZED_BYTES_PER_TOKEN = 16
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")


def check_request(request: inference_pb2.GenerateRequest, vocab_size: int) -> None:
    """Refuse a request that can never be served.

    Raises:
        InvalidArgumentError: names the first invalid field by its path in the proto.
    """
    _check_name("routing.session_id", request.routing.session_id)
    _check_sampling(request.sampling, vocab_size)
    _check_stop(request.stop, vocab_size)
    if request.response.HasField("top_logprobs"):
        check_between("response.top_logprobs", request.response.top_logprobs, TOP_LOGPROBS_RANGE)
    _check_constraint(request.constraint)
    _check_prompt(request, vocab_size)


def request_id_problem(request_id: str) -> str | None:
    """What is wrong with a caller's request id; None if it is valid."""
    if _REQUEST_ID.fullmatch(request_id):
        return None
    return "must be 1 to 128 printable ASCII characters without spaces"


def refuse(field: str, problem: str) -> NoReturn:
    """Raise the error of one field.

    Raises:
        InvalidArgumentError: always.
    """
    raise InvalidArgumentError.for_field(field, problem)


def _check_sampling(sampling: inference_pb2.SamplingParams, vocab_size: int) -> None:
    for name, bounds in SAMPLING_RANGES.items():
        if sampling.HasField(name):
            check_between(f"sampling.{name}", getattr(sampling, name), bounds)
    check_logit_bias(sampling.logit_bias.items())
    _check_ids("sampling.logit_bias", sampling.logit_bias, vocab_size)
    _check_id_list("sampling.allowed_token_ids", sampling.allowed_token_ids, vocab_size)
    _check_id_list("sampling.bad_token_ids", sampling.bad_token_ids, vocab_size)


def _check_stop(stop: inference_pb2.StopParams, vocab_size: int) -> None:
    most = stop.max_tokens if stop.HasField("max_tokens") else None
    if most is not None:
        check_between("stop.max_tokens", most, MAX_TOKENS_RANGE)
    if stop.HasField("min_tokens"):
        check_between("stop.min_tokens", stop.min_tokens, min_tokens_range(most))
    check_stop_strings(stop.stop_strings)
    _check_id_list("stop.stop_token_ids", stop.stop_token_ids, vocab_size)


def _check_constraint(constraint: inference_pb2.Constraint) -> None:
    kind = constraint.WhichOneof("kind")
    if kind is None or kind == "json_object":
        return
    if kind == "choice":
        texts = constraint.choice.texts
        if not 1 <= len(texts) <= MAX_CHOICE_TEXTS or not all(texts):
            refuse(
                "constraint.choice", f"must have 1 to {MAX_CHOICE_TEXTS} texts, none of them empty"
            )
        length = sum(map(len, texts))
    else:
        length = len(getattr(constraint, kind))
        if not length:
            refuse(f"constraint.{kind}", "must not be empty")
    if length > MAX_CONSTRAINT_CHARS:
        refuse(f"constraint.{kind}", f"must have at most {MAX_CONSTRAINT_CHARS} characters")


def _check_prompt(request: inference_pb2.GenerateRequest, vocab_size: int) -> None:
    kind = request.WhichOneof("prompt")
    if kind is None:
        refuse("prompt", "is missing: send text, chat or token_ids")
    if kind == "text" and not request.text:
        refuse("text", "must not be empty")
    if kind == "token_ids":
        if not request.token_ids.ids:
            refuse("token_ids.ids", "must not be empty")
        _check_ids("token_ids.ids", request.token_ids.ids, vocab_size)
    if kind == "chat":
        check_chat(request.chat)
    check_parse_special(request)


def check_parse_special(
    request: inference_pb2.GenerateRequest | inference_pb2.TokenizeRequest,
) -> None:
    """Refuse `parse_special_tokens` for a chat.

    Raises:
        InvalidArgumentError: names the field.
    """
    if request.parse_special_tokens and request.WhichOneof("prompt") == "chat":
        refuse("parse_special_tokens", "is for `text` only: in a chat the template makes them")


def check_chat(chat: inference_pb2.Chat) -> None:
    """Refuse a chat with too many messages or tools to render, or with absurd names.

    Raises:
        InvalidArgumentError: names the field.
    """
    for field, parts, most in (
        ("chat.messages", chat.messages, MAX_MESSAGES),
        ("chat.tools", chat.tools, MAX_TOOLS),
    ):
        if len(parts) > most:
            refuse(field, f"at most {most}, got {len(parts)}")
    for index, message in enumerate(chat.messages):
        _check_message(f"chat.messages[{index}]", message)
    for index, tool in enumerate(chat.tools):
        field = f"chat.tools[{index}]"
        _check_size(f"{field}.description", len(tool.description), MAX_DESCRIPTION_CHARS)
        _check_size(f"{field}.parameters", tool.parameters.ByteSize(), MAX_STRUCT_BYTES, "bytes")
    _check_size("chat.template_args", chat.template_args.ByteSize(), MAX_STRUCT_BYTES, "bytes")
    _check_name("chat.tool_choice.name", chat.tool_choice.name)


def _check_message(field: str, message: inference_pb2.ChatMessage) -> None:
    _check_name(f"{field}.role", message.role)
    _check_name(f"{field}.name", message.name)
    _check_name(f"{field}.tool_call_id", message.tool_call_id)
    if len(message.tool_calls) > MAX_CALLS:
        refuse(f"{field}.tool_calls", f"at most {MAX_CALLS}, got {len(message.tool_calls)}")
    for index, call in enumerate(message.tool_calls):
        _check_name(f"{field}.tool_calls[{index}].id", call.id)
        _check_name(f"{field}.tool_calls[{index}].name", call.name)


def _check_name(field: str, name: str) -> None:
    if len(name) > MAX_NAME_CHARS:
        _check_size(field, len(name), MAX_NAME_CHARS)


def _check_size(field: str, size: int, most: int, unit: str = "characters") -> None:
    if size > most:
        refuse(field, f"at most {most} {unit}, got {size}")


def check_text_to_tokenize(field: str, text: str, max_model_len: int) -> None:
    """Refuse a text that Tokenize would spend seconds on.

    Raises:
        InvalidArgumentError: names the field.
    """
    most = min(MAX_TOKENIZED_BYTES, MAX_TOKENIZED_BYTES_PER_TOKEN * max_model_len)
    size = len(text.encode())
    if size > most:
        refuse(field, f"at most {most} bytes can be tokenized at once, got {size}")


def check_ids_to_decode(ids: Collection[int], vocab_size: int, max_model_len: int) -> None:
    """Refuse token ids that Detokenize does not take.

    Raises:
        InvalidArgumentError: names the field.
    """
    if len(ids) > max_model_len:
        refuse("token_ids", f"at most {max_model_len}, the model's context; got {len(ids)}")
    _check_ids("token_ids", ids, vocab_size)


def _check_id_list(field: str, ids: Collection[int], vocab_size: int) -> None:
    if len(ids) > vocab_size:
        refuse(field, f"has {len(ids)} ids, more than the vocabulary of {vocab_size}")
    _check_ids(field, ids, vocab_size)


def _check_ids(field: str, ids: Iterable[int], vocab_size: int) -> None:
    highest = max(ids, default=-1)
    if highest >= vocab_size:
        refuse(field, f"token id {highest} is outside the vocabulary of {vocab_size}")
