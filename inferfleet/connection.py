"""What both clients share: options of the channel, credentials, metadata, the ids of an answer."""

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
    ("grpc.http2.ping_timeout_ms", 10_000),  # the one that counts; a minute by default
]


@dataclass(frozen=True)
class Settings:
    """How to reach a server and who we are to it."""

    address: str
    api_key: str | None
    tls: bool
    ca_file: str | None

    def credentials(self) -> grpc.ChannelCredentials | None:
        """None for plain text."""
        if not self.tls and self.ca_file is None:
            return None
        roots = Path(self.ca_file).read_bytes() if self.ca_file else None
        return grpc.ssl_channel_credentials(root_certificates=roots)

    def metadata(self, traceparent: str | None = None) -> tuple[tuple[str, str], ...]:
        """What is sent with each call."""
        pairs = []
        if self.api_key:
            pairs.append(("authorization", f"Bearer {self.api_key}"))
        if traceparent:
            pairs.append(("traceparent", traceparent))
        return tuple(pairs)


@dataclass(frozen=True)
class Ids:
    """What a server says of a call before its first message."""

    request_id: str = ""
    trace_id: str = ""
    engine_id: str = ""

    @classmethod
    def of(cls, initial_metadata: Any) -> "Ids":
        """From initial metadata, which may be None."""
        told = dict(initial_metadata or ())
        return cls(
            request_id=str(told.get(REQUEST_ID_KEY, "")),
            trace_id=str(told.get(TRACE_ID_KEY, "")),
            engine_id=str(told.get(ENGINE_ID_KEY, "")),
        )


def only(names: list[str], address: str) -> str:
    """The one model that is served.

    Raises:
        ValueError: there is none, or more than one.
    """
    if len(names) == 1:
        return names[0]
    raise ValueError(f"say which model: {address} serves {', '.join(names) or 'none'}")
