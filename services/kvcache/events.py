"""Publish requests as checked records, and their split into pieces that Redis applies quickly."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from inferfleet_proto.internal.v1 import prefix_index_pb2 as pb
from services.common.block_hash import INDEX_HASH_BYTES
from services.common.errors import InvalidArgumentError

MAX_HASHES_PER_PIECE = 1_000
MAX_ENGINE_ID_CHARS = 200
MAX_PROMPT_BLOCKS = 65_536
MAX_NUMBER = 2**53 - 1
"""Larger numbers lose digits in Lua."""
HISTORY, STATE = 1, 2
"""Bits of the kinds of content that an engine holds of a block."""
_BITS = {pb.BLOCK_KIND_HISTORY: HISTORY, pb.BLOCK_KIND_STATE: STATE}


class OperationCode(StrEnum):
    """What an operation does, as apply.lua reads it."""

    STORED = "S"
    REMOVED = "R"
    CLEARED = "C"


class Operation(NamedTuple):
    """One step of a batch."""

    code: str
    """An OperationCode."""
    bits: int
    """HISTORY and STATE: the kinds stored or removed; 0 for CLEARED."""
    hashes: bytes
    """Block hashes, joined."""


@dataclass(frozen=True)
class Batch:
    """A checked PublishRequest."""

    engine_id: str
    epoch_ms: int
    sequence: int
    operations: tuple[Operation, ...]
    part: int | None = None
    """Number of this part of a snapshot; None outside a snapshot."""
    last_part: bool = False

    @property
    def clears(self) -> bool:
        """Whether the engine has dropped all its blocks in this batch."""
        return any(operation.code == OperationCode.CLEARED for operation in self.operations)


def batch_of(request: pb.PublishRequest) -> Batch:
    """Check a request.

    Raises:
        InvalidArgumentError: a field is out of range or malformed; the error names it.
    """
    check_engine(request.engine_id, request.epoch_ms)
    if not 1 <= request.sequence <= MAX_NUMBER:
        raise InvalidArgumentError.for_field("sequence", f"expected 1 to {MAX_NUMBER}")
    snapshot = request.snapshot if request.HasField("snapshot") else None
    return Batch(
        engine_id=request.engine_id,
        epoch_ms=request.epoch_ms,
        sequence=request.sequence,
        operations=tuple(_operation(event, i) for i, event in enumerate(request.events)),
        part=snapshot.part if snapshot is not None else None,
        last_part=snapshot is not None and snapshot.last,
    )


def check_engine(engine_id: str, epoch_ms: int) -> None:
    """Check an engine id and an epoch.

    Raises:
        InvalidArgumentError: one of them is out of range; the error names it.
    """
    if not 1 <= len(engine_id) <= MAX_ENGINE_ID_CHARS:
        raise InvalidArgumentError.for_field(
            "engine_id", f"expected 1 to {MAX_ENGINE_ID_CHARS} characters"
        )
    if not 1 <= epoch_ms <= MAX_NUMBER:
        raise InvalidArgumentError.for_field("epoch_ms", "expected Unix milliseconds")


def check_hashes(joined: bytes, field: str) -> bytes:
    """Check that joined hashes are complete; returns them.

    Raises:
        InvalidArgumentError: the length is not a multiple of a hash's; the error names `field`.
    """
    if len(joined) % INDEX_HASH_BYTES:
        raise InvalidArgumentError.for_field(
            field, f"{len(joined)} bytes are not a whole number of {INDEX_HASH_BYTES}-byte hashes"
        )
    return joined


def split_operations(operations: Sequence[Operation]) -> Iterator[list[Operation]]:
    """Split operations into groups of at most MAX_HASHES_PER_PIECE hashes; at least one group.

    Each group is applied by one script, and Redis serves no other command while a script runs.
    """
    piece: list[Operation] = []
    room = MAX_HASHES_PER_PIECE
    for code, bits, hashes in operations:
        while True:
            cut = room * INDEX_HASH_BYTES
            piece.append(Operation(code, bits, hashes[:cut]))
            room -= len(hashes[:cut]) // INDEX_HASH_BYTES
            hashes = hashes[cut:]
            if room == 0:
                yield piece
                piece, room = [], MAX_HASHES_PER_PIECE
            if not hashes:
                break
    if piece or not operations:
        yield piece


def _operation(event: pb.BlockEvent, index: int) -> Operation:
    kind = event.WhichOneof("event")
    field = f"events[{index}].{kind}"
    if kind == "cleared":
        return Operation(OperationCode.CLEARED, 0, b"")
    if kind == "removed":
        hashes = check_hashes(event.removed.block_hashes, f"{field}.block_hashes")
        return Operation(
            OperationCode.REMOVED, _BITS.get(event.removed.kind, HISTORY | STATE), hashes
        )
    if kind != "stored":
        raise InvalidArgumentError.for_field(f"events[{index}].event", "is not set")
    if event.stored.kind not in _BITS:
        raise InvalidArgumentError.for_field(f"{field}.kind", "expected HISTORY or STATE")
    if len(event.stored.parent) not in (0, INDEX_HASH_BYTES):
        raise InvalidArgumentError.for_field(
            f"{field}.parent", f"expected {INDEX_HASH_BYTES} bytes or none"
        )
    hashes = check_hashes(event.stored.block_hashes, f"{field}.block_hashes")
    return Operation(OperationCode.STORED, _BITS[event.stored.kind], hashes)
