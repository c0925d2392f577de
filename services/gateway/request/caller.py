"""What a face passes on about the caller of one request."""

from dataclasses import dataclass, field

from opentelemetry.context import Context

from services.gateway.callers.keys_file import Identity
from services.gateway.callers.quota.fit import Need


@dataclass(frozen=True)
class Caller:
    """The caller of one request, independent of the face."""

    face: str
    """"grpc" or "http"."""
    who: Identity = field(default_factory=Identity)
    peer: str = ""
    """Address of the connection's other end."""
    method: str = ""
    """As the audit log shows it."""
    request_id: str | None = None
    """From metadata or a header; an id in the message itself comes first."""
    id_chosen: bool = False
    """Whether the caller chose `request_id`: it may then be in use elsewhere."""
    request_id_field: str = "request_id"
    """The field that an error about the id names."""
    parent: Context = field(default_factory=Context)
    """Of the request's span."""
    timeout_s: float | None = None
    """Seconds until the caller's own deadline."""
    body_need: Need | None = None
    """The need of all prompts of an HTTP body; None: of this request alone."""
    streams: bool = True
    """Whether the caller gets each message at once, and not only the whole answer."""
