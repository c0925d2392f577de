"""What a command says when it cannot go on: one line that tells what to do, and a status."""

import json
from typing import Any

import grpc


class CliError(Exception):
    """Shown as `inferfleet: message`; the process ends with `status`."""

    def __init__(self, message: str, status: int = 1) -> None:
        super().__init__(message)
        self.status = status


def of_rpc(error: grpc.RpcError, address: str) -> CliError:
    """A failed call in words: the status, what the server said, and what may help."""
    code: grpc.StatusCode = error.code()
    details: str = error.details() or ""
    if code is grpc.StatusCode.UNAVAILABLE and "connect" in details.lower():
        return CliError(
            f"nothing answers at {address}: start a fleet with `inferfleet up`,"
            " or name another gateway with --address"
        )
    return CliError(f"{code.name}: {details}")


def to_json(value: Any) -> str:
    """How every --json option prints."""
    return json.dumps(value, indent=2, ensure_ascii=False)
