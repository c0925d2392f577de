"""Converts between etcd's protobufs and the records of types.py; used by client.py only."""

from typing import Any

from etcd3 import etcdrpc

from services.common.etcd.types import (
    Change,
    Changes,
    Compare,
    Delete,
    EtcdUnavailableError,
    KeyValue,
    Listing,
    Put,
)


def changes_of(reply: Any, listed_revision: int) -> Changes:
    if reply.canceled:
        raise EtcdUnavailableError(
            f"etcd cancelled the watch: {reply.cancel_reason or 'compacted'}"
        )
    if reply.header.revision < listed_revision:
        raise EtcdUnavailableError("the store was restored to an older state")
    changes = []
    for event in reply.events:
        item = key_value(event.kv)
        gone = event.type == event.DELETE
        changes.append(Change(item.key, None if gone else item))
    return Changes(int(reply.header.revision), tuple(changes))


def key_value(kv: Any) -> KeyValue:
    key = kv.key.decode(errors="replace")
    return KeyValue(key, kv.value, int(kv.create_revision), int(kv.mod_revision), int(kv.lease))


def listing_of(reply: Any) -> Listing:
    items = (key_value(kv) for kv in reply.kvs)
    return Listing(int(reply.header.revision), {item.key: item for item in items})


def prefix_request(prefix: str) -> Any:
    return etcdrpc.RangeRequest(key=prefix.encode(), range_end=end_of(prefix))


def end_of(prefix: str) -> bytes:
    """The first key after all that start with `prefix`."""
    raw = prefix.encode().rstrip(b"\xff")
    return raw[:-1] + bytes([raw[-1] + 1]) if raw else b"\0"


def compare_of(compare: Compare) -> Any:
    kinds = etcdrpc.Compare
    key = compare.key.encode()
    if compare.field == "create":
        return kinds(key=key, target=kinds.CREATE, create_revision=compare.value)
    if compare.field == "mod":
        return kinds(key=key, target=kinds.MOD, mod_revision=compare.value)
    return kinds(key=key, target=kinds.VALUE, value=compare.value)


def operation_of(operation: Put | Delete) -> Any:
    key = operation.key.encode()
    if isinstance(operation, Put):
        put = etcdrpc.PutRequest(key=key, value=operation.value, lease=operation.lease)
        return etcdrpc.RequestOp(request_put=put)
    return etcdrpc.RequestOp(request_delete_range=etcdrpc.DeleteRangeRequest(key=key))
