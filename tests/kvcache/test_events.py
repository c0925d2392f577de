"""What a publisher may send, and how a batch is cut."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferfleet_proto.internal.v1 import prefix_index_pb2 as pb
from services.common.errors import InvalidArgumentError
from services.kvcache.events import (
    HISTORY,
    MAX_HASHES_PER_PIECE,
    STATE,
    Batch,
    Operation,
    batch_of,
    split_operations,
)


def request(*events: pb.BlockEvent, **fields) -> pb.PublishRequest:
    return pb.PublishRequest(
        **{"engine_id": "e", "epoch_ms": 1, "sequence": 1, "events": events, **fields}
    )


def stored(hashes: bytes, kind: int = pb.BLOCK_KIND_HISTORY, parent: bytes = b"") -> pb.BlockEvent:
    return pb.BlockEvent(stored=pb.Stored(block_hashes=hashes, kind=kind, parent=parent))


def test_a_batch_keeps_the_order_of_its_events():
    removed = pb.BlockEvent(removed=pb.Removed(block_hashes=b"b" * 32))
    cleared = pb.BlockEvent(cleared=pb.Cleared())
    message = request(stored(b"a" * 16, pb.BLOCK_KIND_STATE), cleared, removed)
    assert batch_of(message) == Batch(
        "e",
        1,
        1,
        (
            Operation("S", STATE, b"a" * 16),
            Operation("C", 0, b""),
            Operation("R", HISTORY | STATE, b"b" * 32),
        ),
    )


def test_the_first_part_of_a_snapshot_is_told_from_none():
    assert batch_of(request()).part is None
    first = batch_of(request(snapshot=pb.SnapshotPart(part=0, last=True)))
    assert (first.part, first.last_part) == (0, True)


@pytest.mark.parametrize(
    ("bad", "field"),
    [
        (request(engine_id=""), "engine_id"),
        (request(engine_id="x" * 201), "engine_id"),
        (request(epoch_ms=0), "epoch_ms"),
        (request(epoch_ms=2**60), "epoch_ms"),
        (request(sequence=0), "sequence"),
        (request(pb.BlockEvent()), "events[0].event"),
        (request(stored(b"a" * 15)), "events[0].stored.block_hashes"),
        (request(stored(b"a" * 16, pb.BLOCK_KIND_UNSPECIFIED)), "events[0].stored.kind"),
        (request(stored(b"a" * 16), stored(b"b" * 16, parent=b"x")), "events[1].stored.parent"),
    ],
)
def test_a_bad_field_is_named(bad: pb.PublishRequest, field: str):
    with pytest.raises(InvalidArgumentError) as raised:
        batch_of(bad)
    assert raised.value.violations[0].field == field


def atoms(operations) -> list[tuple[str, bytes]]:
    """One item per hash; one for an operation without any."""
    return [
        (op.code, op.hashes[i : i + 16])
        for op in operations
        for i in range(0, max(len(op.hashes), 1), 16)
    ]


@given(st.lists(st.tuples(st.sampled_from("SR"), st.integers(0, 2_500)) | st.just(("C", 0))))
def test_pieces_hold_everything_in_order_and_no_more_than_their_limit(drawn):
    operations = [
        Operation(code, HISTORY, b"".join(i.to_bytes(16, "big") for i in range(n)))
        for code, n in drawn
    ]
    cut = list(split_operations(operations))
    assert cut
    for piece in cut:
        assert sum(len(op.hashes) // 16 for op in piece) <= MAX_HASHES_PER_PIECE
    assert atoms(op for piece in cut for op in piece) == atoms(operations)
