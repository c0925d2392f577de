"""The error that ends a command: one line that says what to do, and an exit status."""

import json
from typing import Any

import grpc

NOTHING_THERE, CONFLICT, REJECTED = 3, 4, 5
"""Exit statuses of `placement` and `models`; 1 is any other failure, 2 bad usage."""


class CliError(Exception):
    """A failure for the user: `main` prints `inferfleet: message` and exits with `status`."""

    def __init__(self, message: str, status: int = 1) -> None:
        super().__init__(message)
        self.status = status


def from_rpc(error: grpc.RpcError, address: str) -> CliError:
    """Convert a failed call: its status and details, with advice if nothing listens there."""
    code: grpc.StatusCode = error.code()
    details: str = error.details() or ""
    if code is grpc.StatusCode.UNAVAILABLE and _speaks_tls(details):
        return CliError(
            f"{address} and this command do not agree about TLS ({details[:200]}): give --tls with"
            " --ca-file for a gateway with TLS, neither for one without"
        )
    if code is grpc.StatusCode.UNAVAILABLE and "connect" in details.lower():
        return CliError(
            f"no gateway answers at {address}: start a fleet with `inferfleet up`,"
            " or name another gateway with --address"
        )
    return CliError(f"{code.name}: {details}")


def _speaks_tls(details: str) -> bool:
    text = details.lower()
    if any(word in text for word in ("ssl", "tls", "certificate", "handshake")):
        return True
    # What a client without TLS sees of a server with it, other than of one that is not there.
    return "connect" in text and ("socket closed" in text or "settings" in text)


def to_json(value: Any) -> str:
    """Format a value as every --json option prints it."""
    return json.dumps(value, indent=2, ensure_ascii=False)
