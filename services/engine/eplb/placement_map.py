"""What a group of equal engines keeps in etcd about its experts: the map, and what engines say.

Strict JSON both ways: an unknown key, a wrong type or a table that contradicts another is refused
with its path, so that nothing half understood is ever loaded.
"""

from collections import Counter
from typing import Annotated, TypeVar

import msgspec

from services.engine.contract.expert_placement import check_placement
from services.engine.contract.runner import ExpertPlacement, ExpertShape, PlacementRefusedError

Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
Positive = Annotated[int, msgspec.Meta(ge=1)]
Name = Annotated[str, msgspec.Meta(min_length=1)]
Table = tuple[tuple[Count, ...], ...]
T = TypeVar("T")
MAX_BYTES = 700 * 1024
"""Of a map's JSON: one transaction writes it twice, and etcd takes requests of 1.5 MiB."""


class MapFormatError(ValueError):
    """Not a record of this module; the message has the path of what is wrong."""


class PlacementMap(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which logical expert is in which physical slot, and why."""

    version: Count
    """Grows by one with each map of the group; 0 in a draft that is not written yet. It is here and
    not etcd's revision, because an emptied etcd begins to count anew."""
    model: Name
    model_revision: Name
    num_ranks: Positive
    """Rank r of the engine owns the slots r * slots / num_ranks and following."""
    phy2log: Table
    """[layers with experts, slots] the logical expert in each slot."""
    copies: Table
    """[layers, experts] slots that hold each expert: what phy2log says, counted."""
    policy: Name
    """hierarchical, global, manual, or "rollback to N"."""
    window_rounds: Count = 0
    """Rounds over which each engine counted `load`."""
    load: Table = ()
    """[layers, experts] tokens that the map was made for, all engines together; may be empty."""
    balance_before: float | None = None
    """Mean over layers of mean by largest load of a rank, under `load`; 1 is perfect."""
    balance_after: float | None = None
    author: Name
    created_unix_ms: Count

    def for_core(self, version: int | None = None) -> ExpertPlacement:
        """The part of the map that the core needs, under this version (default: the map's own)."""
        return ExpertPlacement(
            self.version if version is None else version, self.phy2log, self.model_revision
        )


class EngineLoads(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one engine counted, and the shape that a map for it must have."""

    engine_id: Name
    model: Name
    model_revision: Name
    num_layers: Positive
    num_experts: Positive
    num_slots: Positive
    num_ranks: Positive
    window_rounds: Count
    load: Table
    """[layers, experts] tokens of the last rounds; all 0 before there were any."""

    @property
    def shape(self) -> ExpertShape:
        return ExpertShape(self.num_layers, self.num_experts, self.num_slots, self.num_ranks)


class Rejection(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A map that an engine did not take; the one before it stays in use."""

    version: Count
    reason: str


class Applied(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one engine does with the maps of its group."""

    engine_id: Name
    version: Count
    """Of the map in use; 0 is the one that an engine starts with."""
    rejected: Rejection | None = None
    """Of the newest map, if that is not in use and will not be."""

    def settled(self, version: int) -> bool:
        """Whether this engine has done with a map: it uses that or a newer one, or refused it."""
        refused = self.rejected is not None and self.rejected.version >= version
        return refused or self.version >= version


def encode(record: msgspec.Struct) -> bytes:
    """JSON without blanks."""
    return msgspec.json.encode(record)


def decode(raw: bytes | str, kind: type[T]) -> T:
    """A record of `kind` whose tables agree.

    Raises:
        MapFormatError: it is none.
    """
    try:
        record = msgspec.json.decode(raw, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise MapFormatError(str(error)) from error
    if isinstance(record, PlacementMap):
        _check_tables(record)
    elif isinstance(record, EngineLoads):
        _check_rows("load", record.load, record.num_layers, record.num_experts)
    return record


def version_in(raw: bytes) -> int:
    """The version that a map claims, also if nothing else of it can be read; else 0."""
    try:
        return msgspec.json.decode(raw, type=_OnlyVersion).version
    except (msgspec.DecodeError, UnicodeDecodeError):
        return 0


def count_copies(phy2log: Table, num_experts: int) -> Table:
    """[layers, experts] slots that hold each expert."""
    counts = [Counter(row) for row in phy2log]
    return tuple(tuple(count[expert] for expert in range(num_experts)) for count in counts)


def problem_with(
    placement: PlacementMap, shape: ExpertShape, model_revision: str, *, draft: bool = False
) -> str | None:
    """Why an engine of this shape cannot use a map, naming layer, slot or expert; None if it can.

    Args:
        draft: a map without a version yet.
    """
    if placement.num_ranks != shape.num_ranks:
        return f"it is for {placement.num_ranks} ranks, the engine has {shape.num_ranks}"
    try:
        check_placement(placement.for_core(1 if draft else None), shape, model_revision)
    except PlacementRefusedError as error:
        return str(error)
    return None


class _OnlyVersion(msgspec.Struct):
    version: Count = 0


def _check_tables(record: PlacementMap) -> None:
    if not record.phy2log or not record.phy2log[0]:
        raise MapFormatError("phy2log is empty - at `$.phy2log`")
    layers, slots = len(record.phy2log), len(record.phy2log[0])
    _check_rows("phy2log", record.phy2log, layers, slots)
    if slots % record.num_ranks:
        raise MapFormatError(
            f"{slots} slots do not divide among {record.num_ranks} ranks - at `$.num_ranks`"
        )
    experts = len(record.copies[0]) if record.copies else 0
    _check_rows("copies", record.copies, layers, experts)
    for layer, row in enumerate(count_copies(record.phy2log, experts)):
        for expert, (found, said) in enumerate(zip(row, record.copies[layer], strict=True)):
            if found != said:
                raise MapFormatError(
                    f"layer {layer}: expert {expert} has {found} slots in phy2log, not {said} - "
                    f"at `$.copies[{layer}][{expert}]`"
                )
        if sum(row) != slots:
            raise MapFormatError(
                f"layer {layer} names experts beyond the {experts} of copies - "
                f"at `$.phy2log[{layer}]`"
            )
    if record.load:
        _check_rows("load", record.load, layers, experts)


def _check_rows(name: str, table: Table, layers: int, width: int) -> None:
    if len(table) != layers:
        raise MapFormatError(f"{len(table)} layers, expected {layers} - at `$.{name}`")
    for layer, row in enumerate(table):
        if len(row) != width:
            raise MapFormatError(
                f"layer {layer} has {len(row)} entries, expected {width} - at `$.{name}[{layer}]`"
            )
