"""Detects ONNX files, which have no magic number: the whole file must be a protobuf message with the fields of ModelProto."""

from __future__ import annotations

import enum
from typing import BinaryIO

_GRAPH = 7
_OPSET_IMPORT = 8
# field number -> wire type, of onnx.ModelProto (onnx/onnx.proto)
_FIELDS = {1: 0, 2: 2, 3: 2, 4: 2, 5: 0, 6: 2, _GRAPH: 2, _OPSET_IMPORT: 2, 14: 2, 20: 2, 25: 2, 26: 2}
_MAX_FIELDS = 100_000


class Onnx(enum.Enum):
    WHOLE = "whole"
    TRUNCATED = "truncated"
    NOT = "not"


def look_at_onnx(file: BinaryIO, size: int) -> Onnx:
    """Walk over the fields of the message, skipping their contents."""
    file.seek(0)
    seen: set[int] = set()
    for _ in range(_MAX_FIELDS):
        at = file.tell()
        if at == size:
            return Onnx.WHOLE if {_GRAPH, _OPSET_IMPORT} <= seen else Onnx.NOT
        tag = _varint(file)
        if tag is None:
            return Onnx.TRUNCATED if seen else Onnx.NOT
        number, wire = tag >> 3, tag & 7
        if _FIELDS.get(number) != wire:
            return Onnx.NOT
        value = _varint(file)
        if value is None:
            return Onnx.TRUNCATED
        if wire == 2:
            if file.tell() + value > size:
                return Onnx.TRUNCATED
            file.seek(value, 1)
        seen.add(number)
    return Onnx.NOT


def _varint(file: BinaryIO) -> int | None:
    value = 0
    for shift in range(0, 70, 7):
        byte = file.read(1)
        if not byte:
            return None
        value |= (byte[0] & 0x7F) << shift
        if byte[0] < 0x80:
            return value
    return None
