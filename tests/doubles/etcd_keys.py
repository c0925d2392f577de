"""What tests do to etcd that no service does."""

from etcd3 import etcdrpc

from services.common.etcd.client import Delete, Etcd


async def delete_prefix(etcd: Etcd, prefix: str) -> int:
    """Delete all keys that start with `prefix`, at one revision; returns their number."""
    keys = list((await etcd.get_prefix(prefix)).items)
    if keys:
        await etcd.transaction([], [Delete(key) for key in keys])
    return len(keys)


async def compact(etcd: Etcd, revision: int) -> None:
    """Drop the history before `revision`; the current keys are kept."""
    await etcd._call("kv.Compact", etcdrpc.CompactionRequest(revision=revision))
