from inferfleet_proto.v1 import inference_pb2 as _inference_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class EngineRequest(_message.Message):
    __slots__ = ("request", "tenant", "salt", "attempt", "continuation", "numerics_id", "model_revision", "shown_token_ids")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    SALT_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    CONTINUATION_FIELD_NUMBER: _ClassVar[int]
    NUMERICS_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_REVISION_FIELD_NUMBER: _ClassVar[int]
    SHOWN_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    request: _inference_pb2.GenerateRequest
    tenant: str
    salt: bytes
    attempt: int
    continuation: Continuation
    numerics_id: str
    model_revision: str
    shown_token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, request: _Optional[_Union[_inference_pb2.GenerateRequest, _Mapping]] = ..., tenant: _Optional[str] = ..., salt: _Optional[bytes] = ..., attempt: _Optional[int] = ..., continuation: _Optional[_Union[Continuation, _Mapping]] = ..., numerics_id: _Optional[str] = ..., model_revision: _Optional[str] = ..., shown_token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class RunFrames(_message.Message):
    __slots__ = ("opened", "credited", "credits", "cancelled")
    OPENED_FIELD_NUMBER: _ClassVar[int]
    CREDITED_FIELD_NUMBER: _ClassVar[int]
    CREDITS_FIELD_NUMBER: _ClassVar[int]
    CANCELLED_FIELD_NUMBER: _ClassVar[int]
    opened: _containers.RepeatedCompositeFieldContainer[Opening]
    credited: _containers.RepeatedScalarFieldContainer[int]
    credits: _containers.RepeatedScalarFieldContainer[int]
    cancelled: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, opened: _Optional[_Iterable[_Union[Opening, _Mapping]]] = ..., credited: _Optional[_Iterable[int]] = ..., credits: _Optional[_Iterable[int]] = ..., cancelled: _Optional[_Iterable[int]] = ...) -> None: ...

class Opening(_message.Message):
    __slots__ = ("stream", "request", "metadata", "timeout_s", "window_bytes")
    STREAM_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    METADATA_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    WINDOW_BYTES_FIELD_NUMBER: _ClassVar[int]
    stream: int
    request: bytes
    metadata: _containers.RepeatedCompositeFieldContainer[Header]
    timeout_s: float
    window_bytes: int
    def __init__(self, stream: _Optional[int] = ..., request: _Optional[bytes] = ..., metadata: _Optional[_Iterable[_Union[Header, _Mapping]]] = ..., timeout_s: _Optional[float] = ..., window_bytes: _Optional[int] = ...) -> None: ...

class Header(_message.Message):
    __slots__ = ("key", "value")
    KEY_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    key: str
    value: str
    def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...

class AnswerFrames(_message.Message):
    __slots__ = ("greeted", "streams", "messages", "ended")
    GREETED_FIELD_NUMBER: _ClassVar[int]
    STREAMS_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    greeted: _containers.RepeatedCompositeFieldContainer[Greeting]
    streams: _containers.RepeatedScalarFieldContainer[int]
    messages: _containers.RepeatedScalarFieldContainer[bytes]
    ended: _containers.RepeatedCompositeFieldContainer[Ending]
    def __init__(self, greeted: _Optional[_Iterable[_Union[Greeting, _Mapping]]] = ..., streams: _Optional[_Iterable[int]] = ..., messages: _Optional[_Iterable[bytes]] = ..., ended: _Optional[_Iterable[_Union[Ending, _Mapping]]] = ...) -> None: ...

class Greeting(_message.Message):
    __slots__ = ("stream", "metadata")
    STREAM_FIELD_NUMBER: _ClassVar[int]
    METADATA_FIELD_NUMBER: _ClassVar[int]
    stream: int
    metadata: _containers.RepeatedCompositeFieldContainer[Header]
    def __init__(self, stream: _Optional[int] = ..., metadata: _Optional[_Iterable[_Union[Header, _Mapping]]] = ...) -> None: ...

class Ending(_message.Message):
    __slots__ = ("stream", "code", "message", "details")
    STREAM_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    DETAILS_FIELD_NUMBER: _ClassVar[int]
    stream: int
    code: int
    message: str
    details: bytes
    def __init__(self, stream: _Optional[int] = ..., code: _Optional[int] = ..., message: _Optional[str] = ..., details: _Optional[bytes] = ...) -> None: ...

class Continuation(_message.Message):
    __slots__ = ("choices",)
    CHOICES_FIELD_NUMBER: _ClassVar[int]
    choices: _containers.RepeatedCompositeFieldContainer[ContinuedChoice]
    def __init__(self, choices: _Optional[_Iterable[_Union[ContinuedChoice, _Mapping]]] = ...) -> None: ...

class ContinuedChoice(_message.Message):
    __slots__ = ("index", "token_ids", "finished", "sent_text_bytes")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    SENT_TEXT_BYTES_FIELD_NUMBER: _ClassVar[int]
    index: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    finished: bool
    sent_text_bytes: int
    def __init__(self, index: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., finished: _Optional[bool] = ..., sent_text_bytes: _Optional[int] = ...) -> None: ...

class GetInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class EngineInfo(_message.Message):
    __slots__ = ("engine_id", "epoch_ms", "address", "model", "model_revision", "hash_namespace", "numerics_id", "block_size", "num_blocks", "max_model_len", "max_num_seqs", "vocab_size", "tokenizer_digest", "dtype", "deterministic", "role", "placement_version", "draining", "eos_token_ids", "tool_parser", "reasoning_parser", "needs_state")
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_MS_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    MODEL_REVISION_FIELD_NUMBER: _ClassVar[int]
    HASH_NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    NUMERICS_ID_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_SEQS_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_DIGEST_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    DETERMINISTIC_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    PLACEMENT_VERSION_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TOOL_PARSER_FIELD_NUMBER: _ClassVar[int]
    REASONING_PARSER_FIELD_NUMBER: _ClassVar[int]
    NEEDS_STATE_FIELD_NUMBER: _ClassVar[int]
    engine_id: str
    epoch_ms: int
    address: str
    model: str
    model_revision: str
    hash_namespace: bytes
    numerics_id: str
    block_size: int
    num_blocks: int
    max_model_len: int
    max_num_seqs: int
    vocab_size: int
    tokenizer_digest: str
    dtype: str
    deterministic: bool
    role: str
    placement_version: int
    draining: bool
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    tool_parser: str
    reasoning_parser: str
    needs_state: bool
    def __init__(self, engine_id: _Optional[str] = ..., epoch_ms: _Optional[int] = ..., address: _Optional[str] = ..., model: _Optional[str] = ..., model_revision: _Optional[str] = ..., hash_namespace: _Optional[bytes] = ..., numerics_id: _Optional[str] = ..., block_size: _Optional[int] = ..., num_blocks: _Optional[int] = ..., max_model_len: _Optional[int] = ..., max_num_seqs: _Optional[int] = ..., vocab_size: _Optional[int] = ..., tokenizer_digest: _Optional[str] = ..., dtype: _Optional[str] = ..., deterministic: _Optional[bool] = ..., role: _Optional[str] = ..., placement_version: _Optional[int] = ..., draining: _Optional[bool] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., tool_parser: _Optional[str] = ..., reasoning_parser: _Optional[str] = ..., needs_state: _Optional[bool] = ...) -> None: ...

class GetTokenizerRequest(_message.Message):
    __slots__ = ("digest",)
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    digest: str
    def __init__(self, digest: _Optional[str] = ...) -> None: ...

class TokenizerChunk(_message.Message):
    __slots__ = ("digest", "chat_template", "special_tokens", "add_bos", "tokenizer_json")
    class SpecialTokensEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    CHAT_TEMPLATE_FIELD_NUMBER: _ClassVar[int]
    SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ADD_BOS_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_JSON_FIELD_NUMBER: _ClassVar[int]
    digest: str
    chat_template: str
    special_tokens: _containers.ScalarMap[str, str]
    add_bos: bool
    tokenizer_json: bytes
    def __init__(self, digest: _Optional[str] = ..., chat_template: _Optional[str] = ..., special_tokens: _Optional[_Mapping[str, str]] = ..., add_bos: _Optional[bool] = ..., tokenizer_json: _Optional[bytes] = ...) -> None: ...

class WatchLoadRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class LoadReport(_message.Message):
    __slots__ = ("engine_id", "epoch_ms", "sequence", "waiting_requests", "running_requests", "uncached_tokens_queued", "held_blocks", "total_blocks", "prefill_tokens_per_s", "decode_round_s", "last_progress_age_s", "draining", "placement_version", "drain_requests_per_s")
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_MS_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    WAITING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    RUNNING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    UNCACHED_TOKENS_QUEUED_FIELD_NUMBER: _ClassVar[int]
    HELD_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    DECODE_ROUND_S_FIELD_NUMBER: _ClassVar[int]
    LAST_PROGRESS_AGE_S_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    PLACEMENT_VERSION_FIELD_NUMBER: _ClassVar[int]
    DRAIN_REQUESTS_PER_S_FIELD_NUMBER: _ClassVar[int]
    engine_id: str
    epoch_ms: int
    sequence: int
    waiting_requests: int
    running_requests: int
    uncached_tokens_queued: int
    held_blocks: int
    total_blocks: int
    prefill_tokens_per_s: float
    decode_round_s: float
    last_progress_age_s: float
    draining: bool
    placement_version: int
    drain_requests_per_s: float
    def __init__(self, engine_id: _Optional[str] = ..., epoch_ms: _Optional[int] = ..., sequence: _Optional[int] = ..., waiting_requests: _Optional[int] = ..., running_requests: _Optional[int] = ..., uncached_tokens_queued: _Optional[int] = ..., held_blocks: _Optional[int] = ..., total_blocks: _Optional[int] = ..., prefill_tokens_per_s: _Optional[float] = ..., decode_round_s: _Optional[float] = ..., last_progress_age_s: _Optional[float] = ..., draining: _Optional[bool] = ..., placement_version: _Optional[int] = ..., drain_requests_per_s: _Optional[float] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("grace_s",)
    GRACE_S_FIELD_NUMBER: _ClassVar[int]
    grace_s: float
    def __init__(self, grace_s: _Optional[float] = ...) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ("streams_ended", "streams_aborted")
    STREAMS_ENDED_FIELD_NUMBER: _ClassVar[int]
    STREAMS_ABORTED_FIELD_NUMBER: _ClassVar[int]
    streams_ended: int
    streams_aborted: int
    def __init__(self, streams_ended: _Optional[int] = ..., streams_aborted: _Optional[int] = ...) -> None: ...

class AbortRequest(_message.Message):
    __slots__ = ("tenant", "request_ids")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    REQUEST_IDS_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    request_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, tenant: _Optional[str] = ..., request_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class AbortResponse(_message.Message):
    __slots__ = ("aborted",)
    ABORTED_FIELD_NUMBER: _ClassVar[int]
    aborted: int
    def __init__(self, aborted: _Optional[int] = ...) -> None: ...
