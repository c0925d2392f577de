"""The errors of the fleet, and their translation to and from gRPC statuses.

Services raise these errors. Only the edges (gRPC interceptors, HTTP handlers) translate them. Every
status has a google.rpc.ErrorInfo with the domain "inferfleet".
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2

DOMAIN = "inferfleet"
DETAILS_KEY = "grpc-status-details-bin"
# Trailers above the peer's limit turn any status into RESOURCE_EXHAUSTED, so these stay small.
MAX_VIOLATIONS = 20
MAX_DETAILS_BYTES = 4096
MAX_MESSAGE_CHARS = 1024


class Violation(NamedTuple):
    """A field of the request, by its path in the proto, and its problem."""

    field: str
    description: str


class FleetError(Exception):
    """Base class of all errors that a caller may receive.

    Attributes:
        message: one sentence for people.
        reason: UPPER_SNAKE_CASE, stable, for programs.
        metadata: facts for programs, all strings.
        retry_after_s: seconds after which to retry; None if a retry is not advised.
        violations: the invalid fields.
    """

    code: ClassVar[grpc.StatusCode] = grpc.StatusCode.INTERNAL
    default_reason: ClassVar[str] = "INTERNAL"

    def __init__(
        self,
        message: str,
        *,
        reason: str | None = None,
        metadata: Mapping[str, str] | None = None,
        retry_after_s: float | None = None,
        violations: Sequence[Violation] = (),
    ) -> None:
        super().__init__(message)
        self.message = message
        self.reason = reason or self.default_reason
        self.metadata = dict(metadata or {})
        self.retry_after_s = retry_after_s
        self.violations = tuple(violations)


class InvalidArgumentError(FleetError):
    """The request can never succeed as it is; no work was done."""

    code = grpc.StatusCode.INVALID_ARGUMENT
    default_reason = "INVALID_ARGUMENT"

    @classmethod
    def for_field(
        cls, field: str, description: str, *, reason: str | None = None, **metadata: str
    ) -> "InvalidArgumentError":
        """The usual case: one field is wrong."""
        return cls(
            f"{field}: {description}",
            reason=reason,
            metadata=metadata,
            violations=(Violation(field, description),),
        )


class NotFoundError(FleetError):
    """No such model, engine or request."""

    code = grpc.StatusCode.NOT_FOUND
    default_reason = "NOT_FOUND"


class UnauthenticatedError(FleetError):
    """The API key is missing or unknown."""

    code = grpc.StatusCode.UNAUTHENTICATED
    default_reason = "UNAUTHENTICATED"


class PermissionDeniedError(FleetError):
    """The caller is known and not allowed to do this."""

    code = grpc.StatusCode.PERMISSION_DENIED
    default_reason = "PERMISSION_DENIED"


class ResourceExhaustedError(FleetError):
    """A quota is used up, the queue is full, or a message is too large."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED
    default_reason = "RESOURCE_EXHAUSTED"


class AlreadyExistsError(FleetError):
    """A request with this id is in flight."""

    code = grpc.StatusCode.ALREADY_EXISTS
    default_reason = "ALREADY_EXISTS"


class FailedPreconditionError(FleetError):
    """The request cannot continue in its current state, e.g. CONSTRAINT_UNSATISFIABLE."""

    code = grpc.StatusCode.FAILED_PRECONDITION
    default_reason = "FAILED_PRECONDITION"


class UnavailableError(FleetError):
    """No service can take the request now; a retry may succeed."""

    code = grpc.StatusCode.UNAVAILABLE
    default_reason = "UNAVAILABLE"


class AbortedError(FleetError):
    """A stream broke after its first token and could not be resumed."""

    code = grpc.StatusCode.ABORTED
    default_reason = "STREAM_BROKEN"


class DeadlineExceededError(FleetError):
    """The caller's deadline passed, or would pass before the work could be done."""

    code = grpc.StatusCode.DEADLINE_EXCEEDED
    default_reason = "DEADLINE_EXCEEDED"


class CancelledError(FleetError):
    """The client left, or the request was aborted on its behalf."""

    code = grpc.StatusCode.CANCELLED
    default_reason = "CANCELLED"


class UnimplementedError(FleetError):
    """This build does not serve that part of the contract."""

    code = grpc.StatusCode.UNIMPLEMENTED
    default_reason = "UNIMPLEMENTED"


class InternalError(FleetError):
    """A bug of the fleet."""


class DataLossError(FleetError):
    """The model produced NaN or infinite logits."""

    code = grpc.StatusCode.DATA_LOSS
    default_reason = "NAN_LOGITS"


_CLASSES: tuple[type[FleetError], ...] = (
    InvalidArgumentError,
    NotFoundError,
    UnauthenticatedError,
    PermissionDeniedError,
    ResourceExhaustedError,
    AlreadyExistsError,
    FailedPreconditionError,
    UnavailableError,
    AbortedError,
    DeadlineExceededError,
    CancelledError,
    UnimplementedError,
    InternalError,
    DataLossError,
)
BY_CODE: Mapping[grpc.StatusCode, type[FleetError]] = {cls.code: cls for cls in _CLASSES}
BY_NAME: Mapping[str, type[FleetError]] = {cls.code.name: cls for cls in _CLASSES}


def plain(number: float) -> str:
    """A number for a message: integers in full, others with six digits."""
    return str(number) if isinstance(number, int) else f"{number:g}"


def status_of(error: FleetError) -> status_pb2.Status:
    """The google.rpc.Status of an error, small enough for gRPC trailers."""
    message = error.message[:MAX_MESSAGE_CHARS]
    status = status_pb2.Status(code=error.code.value[0], message=message)
    info = error_details_pb2.ErrorInfo(
        reason=error.reason, domain=DOMAIN, metadata={k: v[:256] for k, v in error.metadata.items()}
    )
    _attach(status, info)
    if error.retry_after_s is not None:
        delay = duration_pb2.Duration()
        delay.FromNanoseconds(int(error.retry_after_s * 1e9))
        _attach(status, error_details_pb2.RetryInfo(retry_delay=delay))
    if error.violations:
        bad = error_details_pb2.BadRequest()
        for violation in error.violations[:MAX_VIOLATIONS]:
            bad.field_violations.add(
                field=violation.field[:128], description=violation.description[:256]
            )
        _attach(status, bad)
    while status.ByteSize() > MAX_DETAILS_BYTES and status.details:
        del status.details[-1]
    return status


def trailers_of(error: FleetError) -> tuple[tuple[str, bytes], ...]:
    """Trailing metadata to send with the status."""
    return ((DETAILS_KEY, status_of(error).SerializeToString()),)


def error_of(rpc_error: grpc.RpcError) -> FleetError:
    """The FleetError that stands for a failed call to another service; keeps its details."""
    code = rpc_error.code() if hasattr(rpc_error, "code") else grpc.StatusCode.UNKNOWN
    text = (rpc_error.details() if hasattr(rpc_error, "details") else None) or str(code.name)
    cls = BY_CODE.get(code, InternalError)
    trailers: dict[str, str | bytes] = dict(_pairs(rpc_error))
    raw = trailers.get(DETAILS_KEY)
    return _decode(cls, text, raw) if isinstance(raw, bytes) else cls(text)


def _pairs(rpc_error: Any) -> list[tuple[str, str | bytes]]:
    return [(key, value) for key, value in rpc_error.trailing_metadata() or ()]


def _attach(status: status_pb2.Status, detail: Message) -> None:
    packed = any_pb2.Any()
    packed.Pack(detail)
    status.details.append(packed)


def _decode(cls: type[FleetError], text: str, raw: bytes) -> FleetError:
    status = status_pb2.Status.FromString(raw)
    info = error_details_pb2.ErrorInfo()
    retry = error_details_pb2.RetryInfo()
    bad = error_details_pb2.BadRequest()
    known: tuple[Message, ...] = (info, retry, bad)
    for packed in status.details:
        for detail in known:
            if packed.Is(detail.DESCRIPTOR):
                packed.Unpack(detail)
    delay = retry.retry_delay.ToNanoseconds() / 1e9 if retry.HasField("retry_delay") else None
    return cls(
        status.message or text,
        reason=info.reason or None,
        metadata=dict(info.metadata),
        retry_after_s=delay,
        violations=[Violation(v.field, v.description) for v in bad.field_violations],
    )
