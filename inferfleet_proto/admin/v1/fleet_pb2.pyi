from inferfleet_proto.internal.v1 import engine_pb2 as _engine_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ListEnginesRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListEnginesResponse(_message.Message):
    __slots__ = ("engines",)
    ENGINES_FIELD_NUMBER: _ClassVar[int]
    engines: _containers.RepeatedCompositeFieldContainer[EngineView]
    def __init__(self, engines: _Optional[_Iterable[_Union[EngineView, _Mapping]]] = ...) -> None: ...

class EngineView(_message.Message):
    __slots__ = ("info", "load", "in_flight", "state", "registered")
    INFO_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    REGISTERED_FIELD_NUMBER: _ClassVar[int]
    info: _engine_pb2.EngineInfo
    load: _engine_pb2.LoadReport
    in_flight: int
    state: str
    registered: bool
    def __init__(self, info: _Optional[_Union[_engine_pb2.EngineInfo, _Mapping]] = ..., load: _Optional[_Union[_engine_pb2.LoadReport, _Mapping]] = ..., in_flight: _Optional[int] = ..., state: _Optional[str] = ..., registered: _Optional[bool] = ...) -> None: ...

class DrainEngineRequest(_message.Message):
    __slots__ = ("engine_id", "grace_s")
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    GRACE_S_FIELD_NUMBER: _ClassVar[int]
    engine_id: str
    grace_s: float
    def __init__(self, engine_id: _Optional[str] = ..., grace_s: _Optional[float] = ...) -> None: ...

class DrainEngineResponse(_message.Message):
    __slots__ = ("result",)
    RESULT_FIELD_NUMBER: _ClassVar[int]
    result: _engine_pb2.DrainResponse
    def __init__(self, result: _Optional[_Union[_engine_pb2.DrainResponse, _Mapping]] = ...) -> None: ...

class DrainRevisionRequest(_message.Message):
    __slots__ = ("model", "model_revision", "grace_s")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    MODEL_REVISION_FIELD_NUMBER: _ClassVar[int]
    GRACE_S_FIELD_NUMBER: _ClassVar[int]
    model: str
    model_revision: str
    grace_s: float
    def __init__(self, model: _Optional[str] = ..., model_revision: _Optional[str] = ..., grace_s: _Optional[float] = ...) -> None: ...

class DrainRevisionResponse(_message.Message):
    __slots__ = ("engines",)
    ENGINES_FIELD_NUMBER: _ClassVar[int]
    engines: _containers.RepeatedCompositeFieldContainer[DrainedEngine]
    def __init__(self, engines: _Optional[_Iterable[_Union[DrainedEngine, _Mapping]]] = ...) -> None: ...

class DrainedEngine(_message.Message):
    __slots__ = ("engine_id", "result", "problem")
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    RESULT_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    engine_id: str
    result: _engine_pb2.DrainResponse
    problem: str
    def __init__(self, engine_id: _Optional[str] = ..., result: _Optional[_Union[_engine_pb2.DrainResponse, _Mapping]] = ..., problem: _Optional[str] = ...) -> None: ...

class ExplainRequest(_message.Message):
    __slots__ = ("request_id",)
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    def __init__(self, request_id: _Optional[str] = ...) -> None: ...

class ExplainResponse(_message.Message):
    __slots__ = ("request_id", "trace_id", "decisions")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TRACE_ID_FIELD_NUMBER: _ClassVar[int]
    DECISIONS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    trace_id: str
    decisions: _containers.RepeatedCompositeFieldContainer[Decision]
    def __init__(self, request_id: _Optional[str] = ..., trace_id: _Optional[str] = ..., decisions: _Optional[_Iterable[_Union[Decision, _Mapping]]] = ...) -> None: ...

class Decision(_message.Message):
    __slots__ = ("attempt", "unix_ms", "policy", "engine_id", "reason", "candidates", "outcome", "prompt_tokens", "match_known")
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    CANDIDATES_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MATCH_KNOWN_FIELD_NUMBER: _ClassVar[int]
    attempt: int
    unix_ms: int
    policy: str
    engine_id: str
    reason: str
    candidates: _containers.RepeatedCompositeFieldContainer[Candidate]
    outcome: str
    prompt_tokens: int
    match_known: bool
    def __init__(self, attempt: _Optional[int] = ..., unix_ms: _Optional[int] = ..., policy: _Optional[str] = ..., engine_id: _Optional[str] = ..., reason: _Optional[str] = ..., candidates: _Optional[_Iterable[_Union[Candidate, _Mapping]]] = ..., outcome: _Optional[str] = ..., prompt_tokens: _Optional[int] = ..., match_known: _Optional[bool] = ...) -> None: ...

class Candidate(_message.Message):
    __slots__ = ("engine_id", "matched_tokens", "expected_s", "parts")
    class PartsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    MATCHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_S_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    engine_id: str
    matched_tokens: int
    expected_s: float
    parts: _containers.ScalarMap[str, float]
    def __init__(self, engine_id: _Optional[str] = ..., matched_tokens: _Optional[int] = ..., expected_s: _Optional[float] = ..., parts: _Optional[_Mapping[str, float]] = ...) -> None: ...
