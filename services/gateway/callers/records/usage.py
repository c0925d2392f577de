"""One usage record per request that was let in, however it ended."""

import datetime

import msgspec

from inferfleet_proto.v1 import inference_pb2
from services.common.errors import FleetError
from services.common.rpc.continuation import StreamLedger
from services.gateway.callers.keys_file import Identity
from services.gateway.metrics import Facts


class UsageRecord(msgspec.Struct, frozen=True):
    """A line of the usage file."""

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
    """How often another engine carried it on; it is charged once all the same."""
    queued_s: float
    prefill_s: float
    decode_s: float
    """At the engine; 0 of a request that did not come to its end."""
    total_s: float
    """From arrival to end."""

    @property
    def tokens(self) -> int:
        """What quotas are charged."""
        return self.prompt_tokens + self.output_tokens


def record_of(
    facts: Facts,
    ledger: StreamLedger,
    *,
    who: Identity,
    face: str,
    request_id: str,
    model: tuple[str, str],
) -> UsageRecord:
    """The record of a request that has ended; `model` is its name and revision."""
    summary = _summary_of(facts.summary, ledger)
    usage, timings = summary.usage, summary.timings
    return UsageRecord(
        time=stamp(facts.arrived_s),
        request_id=request_id,
        tenant=who.tenant,
        key_id=who.key_id,
        face=face,
        operation=facts.operation,
        model=model[0],
        revision=model[1],
        status=facts.status,
        reason=facts.reason,
        prompt_tokens=usage.prompt_tokens,
        cached_tokens=usage.cached_tokens,
        output_tokens=usage.completion_tokens,
        reasoning_tokens=usage.reasoning_tokens,
        continuations=summary.continuations,
        queued_s=round(timings.queued_s, 6),
        prefill_s=round(timings.prefill_s, 6),
        decode_s=round(timings.decode_s, 6),
        total_s=round(facts.took_s, 6),
    )


def stamp(seconds: float) -> str:
    """RFC 3339 in UTC with milliseconds."""
    moment = datetime.datetime.fromtimestamp(seconds, datetime.UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _summary_of(
    summary: inference_pb2.Summary | None, ledger: StreamLedger
) -> inference_pb2.Summary:
    """A stream's own Summary, or what can be said of one that ended before it."""
    if summary is not None:
        return summary
    partial = inference_pb2.Summary()
    try:
        started, tokens = ledger.started, ledger.num_tokens
    except FleetError:  # an engine that does not speak the protocol; the stream failed of it
        return partial
    if started is not None:
        partial.usage.prompt_tokens = started.prompt_tokens
        partial.usage.cached_tokens = started.cached_tokens
        partial.usage.completion_tokens = tokens
        partial.continuations = ledger.continuations
    return partial
