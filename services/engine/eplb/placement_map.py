"""The records of a placement group in etcd: its map, and each engine's loads and map version.

The JSON is strict: an unknown key, a wrong type or a table that contradicts another is refused
with its path, so no record is ever used in part.
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
"""Largest JSON of a map: one transaction writes it twice, and etcd takes requests of 1.5 MiB."""


class MapFormatError(ValueError):
    """Not a valid record of this module; the message names the path of the error."""


class PlacementMap(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which logical expert is in which slot, and from which load that follows."""

    version: Count
    """Grows by one with each map of the group; 0 in a draft. It is not etcd's revision, because an
    etcd that was emptied counts from 1 again."""
    model: Name
    model_revision: Name
    num_ranks: Positive
    """Rank r of the engine owns slots r * slots / num_ranks to (r + 1) * slots / num_ranks - 1."""
    phy2log: Table
    """[layers with experts, slots] the logical expert in each slot."""
    copies: Table
    """[layers, experts] number of slots that hold each expert, counted in phy2log."""
    policy: Name
    """hierarchical, global, manual, or "rollback to N"."""
    window_rounds: Count = 0
    """Rounds over which each engine counted `load`."""
    load: Table = ()
    """[layers, experts] tokens of all engines that the map was planned for; may be empty."""
    balance_before: float | None = None
    """Balance of the previous map under `load`: per layer the mean load of a rank by the largest,
    averaged over the layers; 1 is perfect."""
    balance_after: float | None = None
    """The same for this map."""
    author: Name
    created_unix_ms: Count

    def for_core(self, version: int | None = None) -> ExpertPlacement:
        """The part of the map that the core needs, under this version (default: the map's own)."""
        return ExpertPlacement(
            self.version if version is None else version, self.phy2log, self.model_revision
        )


class EngineLoads(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The loads that one engine counted, and the shape that a map for it must have."""

    engine_id: Name
    model: Name
    model_revision: Name
    num_layers: Positive
    num_experts: Positive
    num_slots: Positive
    num_ranks: Positive
    window_rounds: Count
    load: Table
    """[layers, experts] tokens of the last `window_rounds` rounds; all 0 before the first round."""

    @property
    def shape(self) -> ExpertShape:
        return ExpertShape(self.num_layers, self.num_experts, self.num_slots, self.num_ranks)


class Rejection(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A map that an engine rejected; the previous one stays in use."""

    version: Count
    reason: str


class Applied(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which map of its group one engine uses, and which it has rejected."""

    engine_id: Name
    version: Count
    """Version of the map in use; an engine starts with version 0."""
    rejected: Rejection | None = None
    """Rejection of the newest map, if the engine rejected it."""

    def settled(self, version: int) -> bool:
        """Whether this engine uses the version or a newer one, or has rejected it."""
        rejected = self.rejected is not None and self.rejected.version >= version
        return rejected or self.version >= version


def encode(record: msgspec.Struct) -> bytes:
    """The record as JSON."""
    return msgspec.json.encode(record)


def decode(raw: bytes | str, kind: type[T]) -> T:
    """Decode a record of `kind` and check that its tables agree.

    Raises:
        MapFormatError: it is not a valid record.
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
    """The version of a map whose other fields may be invalid; 0 if it has none."""
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
    """Why an engine of this shape cannot use a map; None if it can. Names layer, slot or expert.

    Args:
        draft: whether the map has no version yet.
    """
    if placement.num_ranks != shape.num_ranks:
        return f"the map is for {placement.num_ranks} ranks, the engine has {shape.num_ranks}"
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
        for expert, (found, stated) in enumerate(zip(row, record.copies[layer], strict=True)):
            if found != stated:
                raise MapFormatError(
                    f"layer {layer}: expert {expert} has {found} slots in phy2log, not {stated} - "
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
