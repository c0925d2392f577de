from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class ProveRequest(_message.Message):
    __slots__ = ("challenge",)
    CHALLENGE_FIELD_NUMBER: _ClassVar[int]
    challenge: bytes
    def __init__(self, challenge: _Optional[bytes] = ...) -> None: ...

class ProveResponse(_message.Message):
    __slots__ = ("life", "address", "proof")
    LIFE_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    PROOF_FIELD_NUMBER: _ClassVar[int]
    life: bytes
    address: str
    proof: bytes
    def __init__(self, life: _Optional[bytes] = ..., address: _Optional[str] = ..., proof: _Optional[bytes] = ...) -> None: ...
