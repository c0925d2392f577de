"""The fleet's errors in OpenAI's form: HTTP status, body and headers."""

import math
import re
from collections.abc import Mapping
from typing import Any, ClassVar, NoReturn

from services.common.errors import FleetError, Violation

_STATUS: Mapping[str, tuple[int, str]] = {
    "INVALID_ARGUMENT": (400, "invalid_request_error"),
    "FAILED_PRECONDITION": (400, "invalid_request_error"),
    "UNIMPLEMENTED": (400, "invalid_request_error"),
    "UNAUTHENTICATED": (401, "authentication_error"),
    "PERMISSION_DENIED": (403, "permission_error"),
    "NOT_FOUND": (404, "invalid_request_error"),
    "ALREADY_EXISTS": (409, "invalid_request_error"),
    "RESOURCE_EXHAUSTED": (429, "rate_limit_error"),
    "CANCELLED": (499, "server_error"),
    "UNAVAILABLE": (503, "server_error"),
    "DEADLINE_EXCEEDED": (504, "server_error"),
}
_RENAMED = {
    "text": "prompt",
    "token_ids.ids": "prompt",
    "chat": "messages",
    "chat.template_args": "chat_template_kwargs",
    "stop.stop_strings": "stop",
    "stop.include_stop_in_output": "include_stop_str_in_output",
    "response.prompt_logprobs": "logprobs",
    "request_id": "X-Request-Id",
    "chat.tool_choice.name": "tool_choice.function.name",
}
_STRUCTURED = {
    "constraint.json_schema": "structured_outputs.json",
    "constraint.json_object": "structured_outputs.json_object",
    "constraint.structural_tag": "structured_outputs.structural_tag",
    "constraint.regex": "structured_outputs.regex",
    "constraint.ebnf": "structured_outputs.grammar",
    "constraint.choice": "structured_outputs.choice",
}
_STRUCTURED_ONLY = ("constraint.regex", "constraint.ebnf", "constraint.choice")
_TOOL = re.compile(r"chat\.(tools\[\d+\])\.(name|parameters)")
_STOP_STRING = re.compile(r"stop\.stop_strings(\[\d+\])")
_PREFIXES = ("sampling.", "stop.", "response.", "chat.", "routing.", "cache.")


class HttpOnlyError(FleetError):
    """An error of the caller for which HTTP has a status of its own."""

    status: ClassVar[int]

    @property
    def headers(self) -> dict[str, str]:
        """Headers of the answer."""
        return {}


class PayloadTooLargeError(HttpOnlyError):
    """The body is too long."""

    status = 413

    @property
    def headers(self) -> dict[str, str]:
        """Close the connection: the rest of the body may still be on its way."""
        return {"connection": "close"}


class UnsupportedEncodingError(HttpOnlyError):
    """The body has an encoding that is not read here."""

    status = 415

    @classmethod
    def for_header(cls, name: str, value: str, accepted: str) -> "UnsupportedEncodingError":
        """The header is refused; `accepted` are the values that it may have."""
        return cls(
            f"{name}: {value[:64]!r} is not supported; send {accepted}, or no {name}",
            reason="UNSUPPORTED_ENCODING",
            metadata={"accept-encoding": accepted},
            violations=[Violation(name, "is not supported")],
        )

    @property
    def headers(self) -> dict[str, str]:
        """The encodings that may be sent instead.

        The connection closes: a client that waits for 100 Continue may or may not send its body.
        """
        return {"accept-encoding": self.metadata["accept-encoding"], "connection": "close"}


class CrossOriginError(HttpOnlyError):
    """A page of another origin may not call this server."""

    status = 403


def refuse_size(most: int) -> NoReturn:
    """Refuse a body that is longer than `most` bytes.

    Raises:
        PayloadTooLargeError: always.
    """
    raise PayloadTooLargeError(f"the body is longer than {most} bytes", reason="PAYLOAD_TOO_LARGE")


def param_of(field: str, structured: bool = False) -> str:
    """OpenAI's name of a field of the fleet's contract; OpenAI's own names stay unchanged.

    Args:
        structured: whether the body has `structured_outputs`, so that the constraint is from there.
    """
    if field in _STRUCTURED and (structured or field in _STRUCTURED_ONLY):
        return _STRUCTURED[field]
    if field in _RENAMED:
        return _RENAMED[field]
    found = _STOP_STRING.fullmatch(field)
    if found:
        return f"stop{found[1]}"
    found = _TOOL.fullmatch(field)
    if found:
        return f"{found[1]}.function.{found[2]}"
    if field.startswith("constraint"):
        return "response_format"
    for prefix in _PREFIXES:
        if field.startswith(prefix):
            return field.removeprefix(prefix)
    return field


def status_of(error: FleetError) -> int:
    """The HTTP status."""
    if isinstance(error, HttpOnlyError):
        return error.status
    return _STATUS.get(error.code.name, (500, ""))[0]


def body_of(error: FleetError, structured: bool = False) -> dict[str, Any]:
    """The body of an error answer, which is also the payload of an error event.

    Args:
        structured: whether the request's body has `structured_outputs`.
    """
    field = error.violations[0].field if error.violations else None
    message = error.message
    param = None
    if field is not None:
        param = param_of(field, structured)
        if message.startswith(f"{field}:"):
            message = param + message.removeprefix(field)
    kind = _STATUS.get(error.code.name, (500, "server_error"))[1]
    if isinstance(error, HttpOnlyError):
        kind = "invalid_request_error"
    code = error.reason.lower()
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def headers_of(error: FleetError) -> dict[str, str]:
    """Headers that tell a client whether and when to retry."""
    status = status_of(error)
    headers = {"x-should-retry": "true" if status in (429, 503) else "false"}
    if error.retry_after_s is not None:
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after_s)))
    if isinstance(error, HttpOnlyError):
        headers |= error.headers
    # The state of the quotas; gRPC callers find it in the ErrorInfo.
    headers |= {k: v for k, v in error.metadata.items() if k.startswith("x-ratelimit-")}
    return headers
