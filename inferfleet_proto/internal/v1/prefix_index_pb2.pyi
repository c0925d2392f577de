from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class BlockKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    BLOCK_KIND_UNSPECIFIED: _ClassVar[BlockKind]
    BLOCK_KIND_HISTORY: _ClassVar[BlockKind]
    BLOCK_KIND_STATE: _ClassVar[BlockKind]
BLOCK_KIND_UNSPECIFIED: BlockKind
BLOCK_KIND_HISTORY: BlockKind
BLOCK_KIND_STATE: BlockKind

class PublishRequest(_message.Message):
    __slots__ = ("engine_id", "epoch_ms", "sequence", "events", "snapshot")
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_MS_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    engine_id: str
    epoch_ms: int
    sequence: int
    events: _containers.RepeatedCompositeFieldContainer[BlockEvent]
    snapshot: SnapshotPart
    def __init__(self, engine_id: _Optional[str] = ..., epoch_ms: _Optional[int] = ..., sequence: _Optional[int] = ..., events: _Optional[_Iterable[_Union[BlockEvent, _Mapping]]] = ..., snapshot: _Optional[_Union[SnapshotPart, _Mapping]] = ...) -> None: ...

class SnapshotPart(_message.Message):
    __slots__ = ("part", "last")
    PART_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    part: int
    last: bool
    def __init__(self, part: _Optional[int] = ..., last: _Optional[bool] = ...) -> None: ...

class BlockEvent(_message.Message):
    __slots__ = ("stored", "removed", "cleared")
    STORED_FIELD_NUMBER: _ClassVar[int]
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    CLEARED_FIELD_NUMBER: _ClassVar[int]
    stored: Stored
    removed: Removed
    cleared: Cleared
    def __init__(self, stored: _Optional[_Union[Stored, _Mapping]] = ..., removed: _Optional[_Union[Removed, _Mapping]] = ..., cleared: _Optional[_Union[Cleared, _Mapping]] = ...) -> None: ...

class Stored(_message.Message):
    __slots__ = ("block_hashes", "parent", "kind")
    BLOCK_HASHES_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    block_hashes: bytes
    parent: bytes
    kind: BlockKind
    def __init__(self, block_hashes: _Optional[bytes] = ..., parent: _Optional[bytes] = ..., kind: _Optional[_Union[BlockKind, str]] = ...) -> None: ...

class Removed(_message.Message):
    __slots__ = ("block_hashes", "kind")
    BLOCK_HASHES_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    block_hashes: bytes
    kind: BlockKind
    def __init__(self, block_hashes: _Optional[bytes] = ..., kind: _Optional[_Union[BlockKind, str]] = ...) -> None: ...

class Cleared(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PublishResponse(_message.Message):
    __slots__ = ("acked_sequence", "need_snapshot", "stale_epoch")
    ACKED_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    NEED_SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    STALE_EPOCH_FIELD_NUMBER: _ClassVar[int]
    acked_sequence: int
    need_snapshot: bool
    stale_epoch: bool
    def __init__(self, acked_sequence: _Optional[int] = ..., need_snapshot: _Optional[bool] = ..., stale_epoch: _Optional[bool] = ...) -> None: ...

class MatchRequest(_message.Message):
    __slots__ = ("block_hashes", "needs_state")
    BLOCK_HASHES_FIELD_NUMBER: _ClassVar[int]
    NEEDS_STATE_FIELD_NUMBER: _ClassVar[int]
    block_hashes: bytes
    needs_state: bool
    def __init__(self, block_hashes: _Optional[bytes] = ..., needs_state: _Optional[bool] = ...) -> None: ...

class MatchResponse(_message.Message):
    __slots__ = ("known", "engines")
    KNOWN_FIELD_NUMBER: _ClassVar[int]
    ENGINES_FIELD_NUMBER: _ClassVar[int]
    known: bool
    engines: _containers.RepeatedCompositeFieldContainer[EngineMatch]
    def __init__(self, known: _Optional[bool] = ..., engines: _Optional[_Iterable[_Union[EngineMatch, _Mapping]]] = ...) -> None: ...

class EngineMatch(_message.Message):
    __slots__ = ("engine_id", "epoch_ms", "matched_blocks")
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_MS_FIELD_NUMBER: _ClassVar[int]
    MATCHED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    engine_id: str
    epoch_ms: int
    matched_blocks: int
    def __init__(self, engine_id: _Optional[str] = ..., epoch_ms: _Optional[int] = ..., matched_blocks: _Optional[int] = ...) -> None: ...

class ForgetRequest(_message.Message):
    __slots__ = ("engine_id", "epoch_ms")
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_MS_FIELD_NUMBER: _ClassVar[int]
    engine_id: str
    epoch_ms: int
    def __init__(self, engine_id: _Optional[str] = ..., epoch_ms: _Optional[int] = ...) -> None: ...

class ForgetResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StatsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StatsResponse(_message.Message):
    __slots__ = ("store_available", "entries", "owners", "gaps", "resyncs", "stale_writes_refused", "events_applied")
    STORE_AVAILABLE_FIELD_NUMBER: _ClassVar[int]
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    OWNERS_FIELD_NUMBER: _ClassVar[int]
    GAPS_FIELD_NUMBER: _ClassVar[int]
    RESYNCS_FIELD_NUMBER: _ClassVar[int]
    STALE_WRITES_REFUSED_FIELD_NUMBER: _ClassVar[int]
    EVENTS_APPLIED_FIELD_NUMBER: _ClassVar[int]
    store_available: bool
    entries: int
    owners: _containers.RepeatedCompositeFieldContainer[OwnerStats]
    gaps: int
    resyncs: int
    stale_writes_refused: int
    events_applied: int
    def __init__(self, store_available: _Optional[bool] = ..., entries: _Optional[int] = ..., owners: _Optional[_Iterable[_Union[OwnerStats, _Mapping]]] = ..., gaps: _Optional[int] = ..., resyncs: _Optional[int] = ..., stale_writes_refused: _Optional[int] = ..., events_applied: _Optional[int] = ...) -> None: ...

class OwnerStats(_message.Message):
    __slots__ = ("engine_id", "epoch_ms", "last_sequence")
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_MS_FIELD_NUMBER: _ClassVar[int]
    LAST_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    engine_id: str
    epoch_ms: int
    last_sequence: int
    def __init__(self, engine_id: _Optional[str] = ..., epoch_ms: _Optional[int] = ..., last_sequence: _Optional[int] = ...) -> None: ...
