"""The one definition of a block's identity; engine, balancer and kvcache all compare these hashes.

    namespace = H("namespace" | revision | layout | numerics | block size | adapter)
    root      = H("root" | namespace | salt)
    block[i]  = H("block" | block[i-1] or root | token ids of block i | extras)

Every part is length-prefixed, so no two different inputs give the same bytes to hash. A new model
revision or cache layout is a new namespace by itself, so a rolling upgrade cannot mix caches.
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
    """32 bytes that separate caches which must never be mixed."""
    parts = (model_revision, kv_layout, numerics_id, str(block_size), adapter)
    return _digest(b"namespace", (p.encode() for p in parts))


def effective_salt(tenant: str, caller_salt: str = "") -> bytes:
    """32 bytes that separate one tenant's cache from another's; b"" for the anonymous tenant."""
    if not tenant and not caller_salt:
        return b""
    return _digest(b"salt", (tenant.encode(), caller_salt.encode()))


def root(namespace_hash: bytes, salt: bytes = b"") -> BlockHash:
    """Parent of a sequence's first block."""
    return BlockHash(_digest(b"root", (namespace_hash, salt)))


def hash_block(
    parent: BlockHash, token_ids: Sequence[int], extras: Sequence[bytes] = ()
) -> BlockHash:
    """Hash of one full block given its parent's hash (the root for the first)."""
    packed = struct.pack(f"<{len(token_ids)}I", *token_ids)
    return BlockHash(_digest(b"block", (parent, packed, *extras)))


def hash_blocks(
    root_hash: BlockHash, token_ids: Sequence[int], block_size: int, limit: int | None = None
) -> list[BlockHash]:
    """Hashes of all full blocks of `token_ids`, in order; a tail shorter than a block has none."""
    hashes: list[BlockHash] = []
    parent = root_hash
    for start in islice(range(0, len(token_ids) - block_size + 1, block_size), limit):
        parent = hash_block(parent, token_ids[start : start + block_size])
        hashes.append(parent)
    return hashes


def join_for_index(hashes: Iterable[BlockHash]) -> bytes:
    """Cut to what the index stores and joined, as the protos carry them."""
    return b"".join(h[:INDEX_HASH_BYTES] for h in hashes)


def split_from_index(joined: bytes) -> list[bytes]:
    """Inverse of `join_for_index`.

    Raises:
        ValueError: if the length is not a multiple of INDEX_HASH_BYTES.
    """
    if len(joined) % INDEX_HASH_BYTES:
        raise ValueError(
            f"{len(joined)} bytes are not a whole number of {INDEX_HASH_BYTES}-byte hashes"
        )
    return [joined[i : i + INDEX_HASH_BYTES] for i in range(0, len(joined), INDEX_HASH_BYTES)]
