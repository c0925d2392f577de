"""The errors of a call: one class per gRPC status, each with the details that the server sent."""

from typing import Any, ClassVar, NamedTuple

import grpc
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

_DETAILS_KEY = "grpc-status-details-bin"


class FieldViolation(NamedTuple):
    """An invalid field: its path in the contract, and what is wrong with its value."""

    field: str
    description: str


class InferfleetError(Exception):
    """Base class of all errors of a call.

    Attributes:
        message: one sentence for people.
        status: name of the gRPC status, e.g. "NOT_FOUND".
        reason: stable code for programs, e.g. "MODEL_NOT_FOUND"; "" if the server sent none.
        violations: the invalid fields.
        retry_after_s: seconds to wait before a retry; None if the server sent no hint.
        metadata: further facts, e.g. how many tokens a prompt has.
        request_id, trace_id: ids to find the request in logs and traces; "" if unknown.
    """

    status: ClassVar[str] = "UNKNOWN"

    def __init__(
        self,
        message: str,
        *,
        reason: str = "",
        violations: tuple[FieldViolation, ...] = (),
        retry_after_s: float | None = None,
        metadata: dict[str, str] | None = None,
        request_id: str = "",
        trace_id: str = "",
    ) -> None:
        super().__init__(message)
        self.message = message
        self.reason = reason
        self.violations = violations
        self.retry_after_s = retry_after_s
        self.metadata = metadata or {}
        self.request_id = request_id
        self.trace_id = trace_id


class InvalidArgumentError(InferfleetError):
    """The request is invalid; `violations` names the fields."""

    status = "INVALID_ARGUMENT"


class NotFoundError(InferfleetError):
    """The model is not served."""

    status = "NOT_FOUND"


class UnauthenticatedError(InferfleetError):
    """The API key is missing or invalid."""

    status = "UNAUTHENTICATED"


class PermissionDeniedError(InferfleetError):
    """The API key is valid but does not permit this call."""

    status = "PERMISSION_DENIED"


class ResourceExhaustedError(InferfleetError):
    """The quota is used up, the queue is full or the message is too large; see `retry_after_s`."""

    status = "RESOURCE_EXHAUSTED"


class AlreadyExistsError(InferfleetError):
    """A request with this id is already in flight."""

    status = "ALREADY_EXISTS"


class FailedPreconditionError(InferfleetError):
    """The request cannot proceed in the present state, e.g. its constraint is unsatisfiable."""

    status = "FAILED_PRECONDITION"


class UnavailableError(InferfleetError):
    """No engine can take the request now; a retry may succeed."""

    status = "UNAVAILABLE"


class AbortedError(InferfleetError):
    """The stream broke after its first token and could not be resumed."""

    status = "ABORTED"


class DeadlineExceededError(InferfleetError):
    """The deadline passed."""

    status = "DEADLINE_EXCEEDED"


class CancelledError(InferfleetError):
    """The request was cancelled, here or by an operator."""

    status = "CANCELLED"


class UnimplementedError(InferfleetError):
    """The server does not implement this part of the contract."""

    status = "UNIMPLEMENTED"


class InternalError(InferfleetError):
    """A bug in the server."""

    status = "INTERNAL"


class DataLossError(InferfleetError):
    """The model produced NaN or infinite numbers."""

    status = "DATA_LOSS"


_BY_STATUS: dict[str, type[InferfleetError]] = {
    cls.status: cls for cls in InferfleetError.__subclasses__()
}


def from_rpc(error: grpc.RpcError, *, request_id: str = "", trace_id: str = "") -> InferfleetError:
    """Convert a failed call to the exception of its status."""
    call: Any = error
    cls = _BY_STATUS.get(call.code().name, InferfleetError)
    trailers = dict(call.trailing_metadata() or ())
    details = _Details(trailers.get(_DETAILS_KEY))
    return cls(
        details.message or call.details() or call.code().name,
        reason=details.info.reason,
        violations=tuple(
            FieldViolation(v.field, v.description) for v in details.bad.field_violations
        ),
        retry_after_s=details.retry_after_s,
        metadata=dict(details.info.metadata),
        request_id=request_id,
        trace_id=trace_id,
    )


class _Details:
    """The google.rpc.Status in the trailers; empty if it is missing or cannot be parsed."""

    def __init__(self, raw: Any) -> None:
        self.info = error_details_pb2.ErrorInfo()
        self.bad = error_details_pb2.BadRequest()
        self.message = ""
        retry = error_details_pb2.RetryInfo()
        if isinstance(raw, bytes):
            try:
                status = status_pb2.Status.FromString(raw)
            except DecodeError:
                status = status_pb2.Status()
            self.message = status.message
            for packed in status.details:
                for known in (self.info, self.bad, retry):
                    if packed.Is(known.DESCRIPTOR):
                        packed.Unpack(known)
        delay_s = retry.retry_delay.ToNanoseconds() / 1e9
        self.retry_after_s = delay_s if retry.HasField("retry_delay") else None
