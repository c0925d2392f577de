"""Usage records: one per authenticated request, however it ended."""

import datetime

import msgspec

from inferfleet_proto.v1 import inference_pb2
from services.common.errors import FleetError
from services.common.rpc.continuation import StreamLedger
from services.gateway.callers.keys_file import Identity
from services.gateway.metrics import RequestOutcome


class UsageRecord(msgspec.Struct, frozen=True):
    """A line of the usage file; token counts and seconds are 0 where they are unknown."""

    time: str
    """When the request arrived: RFC 3339, UTC."""
    request_id: str
    tenant: str
    key_id: str
    face: str
    operation: str
    model: str
    revision: str
    status: str
    """The gRPC status by name: OK, CANCELLED, …"""
    reason: str
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    reasoning_tokens: int
    continuations: int
    """How often another engine resumed the request; it is charged once."""
    queued_s: float
    prefill_s: float
    decode_s: float
    """At the engine; 0 for a request that did not complete."""
    total_s: float
    """From arrival to the end."""

    @property
    def tokens(self) -> int:
        """Prompt and output tokens: the charge to quotas."""
        return self.prompt_tokens + self.output_tokens


def record_of(
    outcome: RequestOutcome,
    ledger: StreamLedger,
    *,
    who: Identity,
    face: str,
    request_id: str,
    model: tuple[str, str],
) -> UsageRecord:
    """Make the record of an ended request.

    Args:
        ledger: what was forwarded; the source of the counts if the stream has no Summary.
        model: name and revision.
    """
    summary = _summary_of(outcome.summary, ledger)
    usage, timings = summary.usage, summary.timings
    return UsageRecord(
        time=format_time(outcome.arrived_s),
        request_id=request_id,
        tenant=who.tenant,
        key_id=who.key_id,
        face=face,
        operation=outcome.operation,
        model=model[0],
        revision=model[1],
        status=outcome.status,
        reason=outcome.reason,
        prompt_tokens=usage.prompt_tokens,
        cached_tokens=usage.cached_tokens,
        output_tokens=usage.completion_tokens,
        reasoning_tokens=usage.reasoning_tokens,
        continuations=summary.continuations,
        queued_s=round(timings.queued_s, 6),
        prefill_s=round(timings.prefill_s, 6),
        decode_s=round(timings.decode_s, 6),
        total_s=round(outcome.took_s, 6),
    )


def format_time(unix_s: float) -> str:
    """RFC 3339 in UTC with milliseconds."""
    moment = datetime.datetime.fromtimestamp(unix_s, datetime.UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _summary_of(
    summary: inference_pb2.Summary | None, ledger: StreamLedger
) -> inference_pb2.Summary:
    """The stream's Summary, or one made of the messages that were forwarded."""
    if summary is not None:
        return summary
    partial = inference_pb2.Summary()
    try:
        started, tokens = ledger.started, ledger.num_tokens
    except FleetError:  # the engine broke the protocol, which has failed the stream already
        return partial
    if started is not None:
        partial.usage.prompt_tokens = started.prompt_tokens
        partial.usage.cached_tokens = started.cached_tokens
        partial.usage.completion_tokens = tokens
        partial.continuations = ledger.continuations
    return partial
