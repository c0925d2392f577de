"""What a call can fail with: one tree, a class per gRPC status, the server's details kept."""

from typing import Any, ClassVar, NamedTuple

import grpc
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

_DETAILS_KEY = "grpc-status-details-bin"


class FieldViolation(NamedTuple):
    """A field of the request, by its path in the contract, and what is wrong with it."""

    field: str
    description: str


class InferfleetError(Exception):
    """Root of all errors of a call.

    Attributes:
        message: one sentence for a person.
        status: name of the gRPC status, e.g. "NOT_FOUND".
        reason: the server's stable word for programs, e.g. "MODEL_NOT_FOUND"; "" if it gave none.
        violations: the fields at fault.
        retry_after_s: seconds after which a repeat is sensible, if the server said so.
        metadata: facts to act on, e.g. how many tokens a prompt has.
        request_id, trace_id: to look the request up with; "" if the server did not say.
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
    """The request can never succeed as it is; `violations` names the fields."""

    status = "INVALID_ARGUMENT"


class NotFoundError(InferfleetError):
    """No such model."""

    status = "NOT_FOUND"


class UnauthenticatedError(InferfleetError):
    """No API key, or a key that nobody issued."""

    status = "UNAUTHENTICATED"


class PermissionDeniedError(InferfleetError):
    """The key is known and may not do this."""

    status = "PERMISSION_DENIED"


class ResourceExhaustedError(InferfleetError):
    """Quota used up, queue full or message too large; `retry_after_s` says when to come back."""

    status = "RESOURCE_EXHAUSTED"


class AlreadyExistsError(InferfleetError):
    """The request id is in flight."""

    status = "ALREADY_EXISTS"


class FailedPreconditionError(InferfleetError):
    """The request met a state it cannot go on in, e.g. an unsatisfiable constraint."""

    status = "FAILED_PRECONDITION"


class UnavailableError(InferfleetError):
    """Nobody can take the request now; a repeat may succeed."""

    status = "UNAVAILABLE"


class AbortedError(InferfleetError):
    """The stream broke after its first token and nobody could carry it on."""

    status = "ABORTED"


class DeadlineExceededError(InferfleetError):
    """The deadline passed."""

    status = "DEADLINE_EXCEEDED"


class CancelledError(InferfleetError):
    """The request was cancelled, here or by an operator."""

    status = "CANCELLED"


class UnimplementedError(InferfleetError):
    """The server does not serve this part of the contract."""

    status = "UNIMPLEMENTED"


class InternalError(InferfleetError):
    """A bug of the server's."""

    status = "INTERNAL"


class DataLossError(InferfleetError):
    """The model produced numbers that are none."""

    status = "DATA_LOSS"


_BY_STATUS: dict[str, type[InferfleetError]] = {
    cls.status: cls for cls in InferfleetError.__subclasses__()
}


def from_rpc(error: grpc.RpcError, *, request_id: str = "", trace_id: str = "") -> InferfleetError:
    """The error of a failed call."""
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
    """google.rpc.Status from the trailers; empty if there is none or it is damaged."""

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
        told = retry.HasField("retry_delay")
        self.retry_after_s = retry.retry_delay.ToNanoseconds() / 1e9 if told else None
