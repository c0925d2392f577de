"""Commands that read the entries of a prompt's blocks, encoded for `Client.send`."""

import struct
from collections.abc import Iterator
from itertools import chain

from services.common.block_hash import INDEX_HASH_BYTES

_KEYS_PER_COMMAND = 1_024
"""Redis serves no other command meanwhile: about 0.2 ms."""
_MANY = struct.Struct(f"{INDEX_HASH_BYTES}s" * 64)


def encode_reads(entry_prefix: bytes, hashes: bytes) -> Iterator[bytes]:
    """MGET commands for the entries of joined block hashes, in order.

    They are put together directly, because all keys have the same length.
    """
    before = b"\r\n$%d\r\n%s" % (len(entry_prefix) + INDEX_HASH_BYTES, entry_prefix)
    step = _KEYS_PER_COMMAND * INDEX_HASH_BYTES
    for start in range(0, len(hashes), step):
        digests = _split(hashes[start : start + step])
        head = b"*%d\r\n$4\r\nMGET" % (len(digests) + 1)
        yield b"".join((head, before, before.join(digests), b"\r\n"))


def _split(joined: bytes) -> list[bytes]:
    """The single hashes; unpacked 64 at a time, which takes a third of the time of slicing."""
    whole = len(joined) // _MANY.size * _MANY.size
    rest = range(whole, len(joined), INDEX_HASH_BYTES)
    return [
        *chain.from_iterable(_MANY.iter_unpack(joined[:whole])),
        *(joined[start : start + INDEX_HASH_BYTES] for start in rest),
    ]
