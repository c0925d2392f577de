"""The audit log: who called, what was allowed, and how large the request was; never its text."""

import time
from collections.abc import Mapping
from typing import Any

import msgspec

from inferfleet_proto.v1 import inference_pb2
from services.common.errors import FleetError
from services.gateway.callers.keys_file import Identity
from services.gateway.callers.records.line_log import Sink
from services.gateway.callers.records.usage import format_time

UNIDENTIFIED = Identity()


class AuditRecord(msgspec.Struct, frozen=True, omit_defaults=True, rename={"summary": "asked"}):
    """A line of the audit file; fields that do not apply are left out."""

    time: str
    event: str
    """"request", or an operator's action: "keys", "drain", "log_level"."""
    decision: str
    """"allowed" or "refused"; for an operator's action "done" or "failed"."""
    why: str = ""
    """The reason of a refusal, e.g. RATE_LIMIT_EXCEEDED; the content of an operator's action."""
    field: str = ""
    """The request's field at fault."""
    method: str = ""
    tenant: str = ""
    key_id: str = ""
    peer: str = ""
    """Address of the connection's other end; behind a proxy that is the proxy's."""
    request_id: str = ""
    model: str = ""
    summary: Mapping[str, Any] = {}
    """Sizes and limits of the request; written as `asked`."""


class Audit:
    """Writes audit records; does nothing without a sink."""

    def __init__(self, sink: Sink | None) -> None:
        self._sink = sink

    @property
    def enabled(self) -> bool:
        """Whether records are written: measuring a large request takes time."""
        return self._sink is not None

    def record_allowed(
        self, method: str, who: Identity, peer: str, request_id: str = "", **more: Any
    ) -> None:
        """Record a call that was let in.

        Args:
            more: further fields of AuditRecord.
        """
        self._put("allowed", method, who, peer, request_id, **more)

    def record_refused(
        self,
        method: str,
        who: Identity | None,
        peer: str,
        error: BaseException,
        request_id: str = "",
        **more: Any,
    ) -> None:
        """Record a call that was refused with this error.

        Args:
            who: None: the caller could not be identified.
            more: further fields of AuditRecord.
        """
        if self._sink is None:
            return
        field, why = "", type(error).__name__
        if isinstance(error, FleetError):
            why = error.reason
            field = error.violations[0].field if error.violations else ""
        # A field's name may hold a part of the caller's own text, e.g. a key of a map.
        name = field.partition("[")[0][:64]
        caller = who or UNIDENTIFIED
        self._put("refused", method, caller, peer, request_id, why=why, field=name, **more)

    def record_action(self, event: str, content: str, *, succeeded: bool = True) -> None:
        """Record an operator's action, e.g. a changed keys file."""
        if self._sink is not None:
            decision = "done" if succeeded else "failed"
            now = format_time(time.time())
            self._sink.put(AuditRecord(now, event=event, decision=decision, why=content))

    def _put(
        self, decision: str, method: str, who: Identity, peer: str, request_id: str, **more: Any
    ) -> None:
        if self._sink is None:
            return
        self._sink.put(
            AuditRecord(
                format_time(time.time()),
                event="request",
                decision=decision,
                method=method,
                tenant=who.tenant,
                key_id=who.key_id,
                peer=peer,
                request_id=request_id,
                **more,
            )
        )


def request_summary(request: inference_pb2.GenerateRequest) -> dict[str, Any]:
    """Sizes and limits of a request, without any of its content."""
    kind = request.WhichOneof("prompt") or ""
    summary: dict[str, Any] = {"prompt": kind, "bytes": request.ByteSize()}
    if kind == "token_ids":
        summary["prompt_tokens"] = len(request.token_ids.ids)
    elif kind == "chat":
        summary["messages"] = len(request.chat.messages)
        summary["tools"] = len(request.chat.tools)
    if request.sampling.HasField("n"):
        summary["n"] = request.sampling.n
    if request.stop.HasField("max_tokens"):
        summary["max_tokens"] = request.stop.max_tokens
    constraint = request.constraint.WhichOneof("kind")
    if constraint:
        summary["constraint"] = constraint
    return summary
