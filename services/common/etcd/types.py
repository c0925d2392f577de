"""Records and errors of the etcd client: keys, listings, changes, parts of a transaction."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal


class EtcdError(Exception):
    """Base class of all errors of the etcd client."""


class EtcdUnavailableError(EtcdError):
    """No endpoint answered in time; a write may or may not have been applied."""


class EtcdRefusedError(EtcdError):
    """etcd refused the request: permissions, quota, or a malformed request."""


class LeaseNotFoundError(EtcdRefusedError):
    """The lease has expired, was revoked, or belongs to a store that was emptied."""


@dataclass(frozen=True)
class Tls:
    """PEM data: the CA (None: the system's), and certificate and key for client authentication."""

    ca: bytes | None = None
    cert: bytes | None = None
    key: bytes | None = None


@dataclass(frozen=True)
class KeyValue:
    """A key's current state; `create_revision` identifies this life of the key, `lease` 0: none."""

    key: str
    value: bytes
    create_revision: int
    mod_revision: int
    lease: int


@dataclass(frozen=True)
class Listing:
    """All keys below a prefix at one revision; in a watch it replaces all earlier records."""

    revision: int
    items: Mapping[str, KeyValue]


@dataclass(frozen=True)
class Change:
    """A key's new state; `value` None: it was deleted or its lease expired."""

    key: str
    value: KeyValue | None


@dataclass(frozen=True)
class Changes:
    """One answer of the watch: whole transactions in order, to be applied together."""

    revision: int
    changes: tuple[Change, ...]


@dataclass(frozen=True)
class Lost:
    """The watch broke; a Listing follows when etcd answers again."""

    reason: str


@dataclass(frozen=True)
class Compare:
    """Holds if the key's field equals `value`; revision 0 means that the key does not exist."""

    key: str
    field: Literal["create", "mod", "value"]
    value: int | bytes


@dataclass(frozen=True)
class Put:
    """Write a key, in a transaction."""

    key: str
    value: bytes
    lease: int = 0


@dataclass(frozen=True)
class Delete:
    """Remove a key, in a transaction."""

    key: str


def parse_endpoint(text: str) -> tuple[str, bool]:
    """Parse host:port, with or without http:// or https://, into (host:port, uses TLS).

    Raises:
        ValueError: the text is not host:port.
    """
    scheme, _, rest = text.rpartition("://")
    target = rest.rstrip("/")
    host, _, port = target.rpartition(":")
    if scheme not in ("", "http", "https") or not host or not port.isdigit():
        raise ValueError(f"{text!r} is not host:port")
    return target, scheme == "https"
