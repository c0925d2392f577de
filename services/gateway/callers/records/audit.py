"""Who did what and whether it was allowed: sizes and limits of a request, never its text."""

import time
from collections.abc import Mapping
from typing import Any

import msgspec

from inferfleet_proto.v1 import inference_pb2
from services.common.errors import FleetError
from services.gateway.callers.keys_file import Identity
from services.gateway.callers.records.line_log import Sink
from services.gateway.callers.records.usage import stamp

NOBODY = Identity()


class AuditRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """A line of the audit file; what does not apply is left out."""

    time: str
    event: str
    """"request", or an act of an operator: "keys", "drain", "log_level"."""
    decision: str
    """"allowed" or "refused"; of an operator's act "done" or "failed"."""
    why: str = ""
    """The reason of a refusal, e.g. RATE_LIMIT_EXCEEDED; what an operator's act was."""
    field: str = ""
    """What in the request was at fault."""
    method: str = ""
    tenant: str = ""
    key_id: str = ""
    peer: str = ""
    """Address of the connection's other end; behind a proxy that is the proxy's."""
    request_id: str = ""
    model: str = ""
    asked: Mapping[str, Any] = {}
    """Sizes and limits."""


class Audit:
    """Writes audit records; without a sink it does nothing."""

    def __init__(self, sink: Sink | None) -> None:
        self._sink = sink

    @property
    def on(self) -> bool:
        """Whether anybody reads it: the size of a large request takes time to tell."""
        return self._sink is not None

    def allowed(
        self, method: str, who: Identity, peer: str, request_id: str = "", **more: Any
    ) -> None:
        """A call was let in."""
        self._put("allowed", method, who, peer, request_id, **more)

    def refused(
        self,
        method: str,
        who: Identity | None,
        peer: str,
        error: BaseException,
        request_id: str = "",
        **more: Any,
    ) -> None:
        """A call was not let in."""
        if self._sink is None:
            return
        field, why = "", type(error).__name__
        if isinstance(error, FleetError):
            why = error.reason
            field = error.violations[0].field if error.violations else ""
        # A field may hold a part of the caller's own text, e.g. a key of a map.
        where = field.partition("[")[0][:64]
        self._put("refused", method, who or NOBODY, peer, request_id, why=why, field=where, **more)

    def act(self, event: str, what: str, *, good: bool = True) -> None:
        """An operator did something."""
        if self._sink is not None:
            decision = "done" if good else "failed"
            record = AuditRecord(stamp(time.time()), event=event, decision=decision, why=what)
            self._sink.put(record)

    def _put(
        self, decision: str, method: str, who: Identity, peer: str, request_id: str, **more: Any
    ) -> None:
        if self._sink is None:
            return
        self._sink.put(
            AuditRecord(
                stamp(time.time()),
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


def asked_of(request: inference_pb2.GenerateRequest) -> dict[str, Any]:
    """Sizes and limits of a request; nothing of its content."""
    kind = request.WhichOneof("prompt") or ""
    asked: dict[str, Any] = {"prompt": kind, "bytes": request.ByteSize()}
    if kind == "token_ids":
        asked["prompt_tokens"] = len(request.token_ids.ids)
    elif kind == "chat":
        asked["messages"] = len(request.chat.messages)
        asked["tools"] = len(request.chat.tools)
    if request.sampling.HasField("n"):
        asked["n"] = request.sampling.n
    if request.stop.HasField("max_tokens"):
        asked["max_tokens"] = request.stop.max_tokens
    constraint = request.constraint.WhichOneof("kind")
    if constraint:
        asked["constraint"] = constraint
    return asked
