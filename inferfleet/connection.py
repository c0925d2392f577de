"""What both clients share: channel options, credentials, call metadata and the ids of a call."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

DEFAULT_ADDRESS = "127.0.0.1:50051"
MAX_MESSAGE_BYTES = 16 * 1024 * 1024
REQUEST_ID_KEY = "inferfleet-request-id"
TRACE_ID_KEY = "inferfleet-trace-id"
ENGINE_ID_KEY = "inferfleet-engine-id"

OPTIONS: list[tuple[str, Any]] = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.ping_timeout_ms", 10_000),  # this one decides; its default is a minute
]


@dataclass(frozen=True)
class Settings:
    """How to reach a server, and the credentials to show to it."""

    address: str
    api_key: str | None
    tls: bool
    ca_file: str | None

    def credentials(self) -> grpc.ChannelCredentials | None:
        """The channel credentials; None means an unencrypted connection."""
        if not self.tls and self.ca_file is None:
            return None
        roots = Path(self.ca_file).read_bytes() if self.ca_file else None
        return grpc.ssl_channel_credentials(root_certificates=roots)

    def metadata(self, traceparent: str | None = None) -> tuple[tuple[str, str], ...]:
        """The metadata that is sent with each call."""
        pairs = []
        if self.api_key:
            pairs.append(("authorization", f"Bearer {self.api_key}"))
        if traceparent:
            pairs.append(("traceparent", traceparent))
        return tuple(pairs)


@dataclass(frozen=True)
class Ids:
    """The ids of one call, from the server's initial metadata; "" where one is missing."""

    request_id: str = ""
    trace_id: str = ""
    engine_id: str = ""

    @classmethod
    def of(cls, initial_metadata: Any) -> "Ids":
        """Read the ids from initial metadata, which may be None."""
        metadata = dict(initial_metadata or ())
        return cls(
            request_id=str(metadata.get(REQUEST_ID_KEY, "")),
            trace_id=str(metadata.get(TRACE_ID_KEY, "")),
            engine_id=str(metadata.get(ENGINE_ID_KEY, "")),
        )


def only_model(names: list[str], address: str) -> str:
    """The single served model, for calls that name none.

    Raises:
        ValueError: the server serves no model or several.
    """
    if len(names) == 1:
        return names[0]
    raise ValueError(
        f"name a model with `model=`: {address} serves {', '.join(names) or 'no model'}"
    )
