"""Reads tokenizer.model, the protobuf file of SentencePiece.

Only five fields are needed, so the file is read here rather than with the SentencePiece package,
which would be one more dependency. Format: sentencepiece_model.proto.
"""

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from services.engine.contract.model_config import ModelFileError
from services.engine.model_files.spm_tokenizer import NORMAL, Pieces, spm_tokenizer

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_PIECES, _TRAINER, _NORMALIZER = 1, 2, 3
_MODEL_TYPE, _BPE = 3, 2
_CHARSMAP, _ADD_PREFIX, _REMOVE_SPACES = 2, 3, 4


def read_spm(path: Path) -> Tokenizer:
    """Build the tokenizer of a tokenizer.model file.

    Raises:
        ModelFileError: the file is broken, or needs a feature that is not supported.
    """
    try:
        fields = list(_fields(path.read_bytes()))
    except (OSError, IndexError, struct.error, ValueError) as error:
        raise ModelFileError(f"{path}: not a SentencePiece model: {error}") from error
    trainer = dict(_fields(_last(fields, _TRAINER)))
    rules = dict(_fields(_last(fields, _NORMALIZER)))
    if trainer.get(_MODEL_TYPE, 1) != _BPE:
        raise ModelFileError(
            f"{path}: only BPE is served, not SentencePiece's other types: add a tokenizer.json "
            "(AutoTokenizer.from_pretrained(folder).save_pretrained(folder) writes one)"
        )
    if rules.get(_CHARSMAP) or rules.get(_REMOVE_SPACES, 1):
        raise ModelFileError(
            f"{path}: its normalizer changes characters or spaces, which is not supported: add a "
            "tokenizer.json (AutoTokenizer.from_pretrained(folder).save_pretrained(folder))"
        )
    pieces = [dict(_fields(value)) for number, value in fields if number == _PIECES]
    return spm_tokenizer(_pieces(pieces), add_prefix=bool(rules.get(_ADD_PREFIX, 1)))


def _pieces(found: list[dict[int, Any]]) -> Pieces:
    return Pieces(
        tokens=[piece[1].decode() for piece in found],
        scores=[piece.get(2, 0.0) for piece in found],
        types=[piece.get(3, NORMAL) for piece in found],
    )


def _last(fields: list[tuple[int, Any]], wanted: int) -> bytes:
    values = [value for number, value in fields if number == wanted]
    return bytes(values[-1]) if values else b""


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """Field numbers and values (ints, floats, bytes) of a protobuf message.

    Raises:
        ValueError: the message is broken.
        IndexError: it ends in a number.
        struct.error: it ends in a float.
    """
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        number, wire = key >> 3, key & 7
        if wire == _VARINT:
            value, at = _varint(data, at)
            yield number, value
        elif wire == _BYTES:
            size, at = _varint(data, at)
            if at + size > len(data):
                raise ValueError("it ends within a field")
            yield number, data[at : at + size]
            at += size
        elif wire in (_FIXED32, _FIXED64):
            layout = "<f" if wire == _FIXED32 else "<d"
            yield number, struct.unpack_from(layout, data, at)[0]
            at += struct.calcsize(layout)
        else:
            raise ValueError(f"field {number} has the unknown wire type {wire}")


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at
