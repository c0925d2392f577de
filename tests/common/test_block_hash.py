"""Golden values: an accidental change of the hash would silently empty every cache of a fleet."""

import hashlib
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.common import block_hash as bh

NAMESPACE = "16e86e50027368e4cd6bf96e5bd60499ac7954fc5d1a79c4f87d56142055474b"
ROOT = "30f92f6af4107f3ce01b79fc3cc8456fd276a3635176a443df93b2baff8b21bb"
SALTED_ROOT = "eb7037569d26b1aef6b1d4dc39eafbf9c82d51ebf7cc3645402cdb1d533699e8"
TOKENS = [0, 1, 2, 3, 49151, 5, 6, 4294967295, 8]
BLOCKS = [
    "5c5cf2cc16b6296b7fe2ac23b6f71dfeb41257378c33cc719fb853ed5fd2b67e",
    "ac9c54c3befae7f641d4eed91c8f259d283b92764d13500267c78c112e0f280f",
]
WITH_EXTRAS = "838637f8407f11cfb2ddf25d5e888fc082759acab8d0e5d412decee701e12ccc"


def namespace(**changed) -> bytes:
    parts = {
        "model_revision": "smollm2-135m@q4_1",
        "kv_layout": "paged/16/float32",
        "numerics_id": "cpu-1",
        "block_size": 4,
    }
    return bh.namespace(**{**parts, **changed})


def test_golden_values():
    assert namespace().hex() == NAMESPACE
    assert bh.effective_salt("tenant-1").hex() == (
        "5d19d988aebef5187dbab2d78fb261c759ae978dbe153074268978bbe1e593d9"
    )
    root = bh.root(namespace())
    assert root.hex() == ROOT
    assert bh.root(namespace(), bh.effective_salt("tenant-1")).hex() == SALTED_ROOT
    assert [h.hex() for h in bh.hash_blocks(root, TOKENS, 4)] == BLOCKS
    assert bh.hash_block(root, TOKENS[:4], [b"image:1"]).hex() == WITH_EXTRAS


def test_the_definition_written_out():
    """The golden numbers, derived once more without the module."""

    def digest(*parts: bytes) -> bytes:
        domain, *rest = parts
        raw = struct.pack("<I", len(domain)) + domain
        return hashlib.sha256(raw + b"".join(struct.pack("<Q", len(p)) + p for p in rest)).digest()

    space = digest(b"namespace", b"smollm2-135m@q4_1", b"paged/16/float32", b"cpu-1", b"4", b"")
    root = digest(b"root", space, b"")
    first = digest(b"block", root, struct.pack("<4I", *TOKENS[:4]))
    second = digest(b"block", first, struct.pack("<4I", *TOKENS[4:8]))
    assert [space.hex(), root.hex(), first.hex(), second.hex()] == [NAMESPACE, ROOT, *BLOCKS]


def test_every_part_makes_another_namespace():
    spaces = {
        namespace(),
        namespace(model_revision="smollm2-135m@q4_2"),
        namespace(kv_layout="paged/16/bfloat16"),
        namespace(numerics_id="cpu-2"),
        namespace(block_size=8),
        namespace(adapter="x"),
        # Moving a letter over a border must not give the same bytes.
        namespace(model_revision="smollm2-135m@q4_", kv_layout="1paged/16/float32"),
    }
    assert len(spaces) == 7


@pytest.mark.parametrize("caller", ["", "X", "X\0", "tenant"])
def test_tenants_and_callers_salts_are_apart(caller):
    salts = {bh.effective_salt(t, caller) for t in ("", "tenant", "tenant2", "X")}
    assert len(salts) == 4
    assert bh.effective_salt("a", "b") != bh.effective_salt("ab", "")
    assert bh.effective_salt("", "") == b""


@given(st.lists(st.integers(0, 2**32 - 1), max_size=40), st.integers(1, 9), st.integers(0, 5))
def test_blocks_are_full_and_depend_on_all_before_them(tokens, size, changed):
    root = bh.root(b"n")
    hashes = bh.hash_blocks(root, tokens, size)
    assert len(hashes) == len(tokens) // size
    assert bh.hash_blocks(root, tokens, size, 2) == hashes[:2]
    if changed < len(hashes) * size:
        other = list(tokens)
        other[changed] ^= 1
        first = changed // size
        after = bh.hash_blocks(root, other, size)
        assert after[:first] == hashes[:first]
        assert not set(after[first:]) & set(hashes[first:])


@given(st.lists(st.binary(min_size=32, max_size=32), max_size=5))
def test_joined_hashes_are_cut_to_16_bytes_each(hashes):
    joined = bh.join_for_index(bh.BlockHash(h) for h in hashes)
    assert len(joined) == 16 * len(hashes)
    for i, whole in enumerate(hashes):
        assert joined[16 * i : 16 * (i + 1)] == whole[:16]
