"""The hash that identifies a block; engine, balancer and kvcache compare these hashes.

    namespace = H("namespace" | revision | layout | numerics | block size | adapter)
    root      = H("root" | namespace | salt)
    block[i]  = H("block" | block[i-1] or root | token ids of block i | extras)

Every part is length-prefixed, so no two different inputs give the same bytes to hash. A new model
revision or cache layout gives a new namespace, so a rolling upgrade cannot mix caches.
"""

import hashlib
import struct
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import NewType

BlockHash = NewType("BlockHash", bytes)
"""All 32 bytes; an engine decides reuse on these."""

INDEX_HASH_BYTES = 16
"""What the prefix index stores and what travels in Match and Publish."""


def _digest(domain: bytes, parts: Iterable[bytes]) -> bytes:
    hasher = hashlib.sha256(struct.pack("<I", len(domain)) + domain)
    for part in parts:
        hasher.update(struct.pack("<Q", len(part)))
        hasher.update(part)
    return hasher.digest()


def namespace(
    *, model_revision: str, kv_layout: str, numerics_id: str, block_size: int, adapter: str = ""
) -> bytes:
    """The namespace hash (32 bytes), which separates caches that must not be mixed."""
    parts = (model_revision, kv_layout, numerics_id, str(block_size), adapter)
    return _digest(b"namespace", (p.encode() for p in parts))


def effective_salt(tenant: str, caller_salt: str = "") -> bytes:
    """The salt (32 bytes) that separates tenants' caches; b"" for the anonymous tenant."""
    if not tenant and not caller_salt:
        return b""
    return _digest(b"salt", (tenant.encode(), caller_salt.encode()))


def root(namespace_hash: bytes, salt: bytes = b"") -> BlockHash:
    """The parent hash of a sequence's first block."""
    return BlockHash(_digest(b"root", (namespace_hash, salt)))


def hash_block(
    parent: BlockHash, token_ids: Sequence[int], extras: Sequence[bytes] = ()
) -> BlockHash:
    """The hash of one full block, from its parent's hash (the root for the first block)."""
    packed = struct.pack(f"<{len(token_ids)}I", *token_ids)
    return BlockHash(_digest(b"block", (parent, packed, *extras)))


def hash_blocks(
    root_hash: BlockHash, token_ids: Sequence[int], block_size: int, limit: int | None = None
) -> list[BlockHash]:
    """The hashes of the full blocks of `token_ids`, in order; at most `limit` of them."""
    hashes: list[BlockHash] = []
    parent = root_hash
    for start in islice(range(0, len(token_ids) - block_size + 1, block_size), limit):
        parent = hash_block(parent, token_ids[start : start + block_size])
        hashes.append(parent)
    return hashes


def join_for_index(hashes: Iterable[BlockHash]) -> bytes:
    """Shorten hashes to INDEX_HASH_BYTES and join them, as the protos carry them."""
    return b"".join(h[:INDEX_HASH_BYTES] for h in hashes)
