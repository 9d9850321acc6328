"""Detects ONNX files, and finds the files beside them that hold their weights."""

from __future__ import annotations

import enum
import re
from collections.abc import Iterator
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import BinaryIO

from tsx_archiver.errors import UnsafePath
from tsx_archiver.names import is_inside, normal, path_fault, shown

_GRAPH = 7
_OPSET_IMPORT = 8
# field number -> wire type, of onnx.ModelProto (onnx/onnx.proto)
_FIELDS = {
    1: 0,
    2: 2,
    3: 2,
    4: 2,
    5: 0,
    6: 2,
    _GRAPH: 2,
    _OPSET_IMPORT: 2,
    14: 2,
    20: 2,
    25: 2,
    26: 2,
}
_MAX_FIELDS = 100_000

# The start of an entry `location` of protobuf's type StringStringEntryProto.
_LOCATION = re.compile(rb"\n\x08location\x12")
_EXTERNAL_DATA = 13 << 3 | 2  # the tag of a tensor's field of that name


class Onnx(enum.Enum):
    WHOLE = "whole"
    TRUNCATED = "truncated"
    NOT = "not"


def look_at_onnx(file: BinaryIO, size: int) -> Onnx:
    """Walk over the fields of the message, skipping their contents.

    Detects ONNX files, which have no magic number: the whole file must be a protobuf message with
    the fields of ModelProto.
    """
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


def _varint(file: BinaryIO | mmap) -> int | None:
    value = 0
    for shift in range(0, 70, 7):
        byte = file.read(1)
        if not byte:
            return None
        value |= (byte[0] & 0x7F) << shift
        if byte[0] < 0x80:
            return value
    return None


def data_files(path: Path) -> dict[str, Path]:
    """Find the files that hold the weights of an ONNX model, by their names relative to it.

    The files may be missing, and a model of another kind has none. Raises UnsafePath for a file
    outside the model's directory.
    """
    with path.open("rb") as file:
        if look_at_onnx(file, file.seek(0, 2)) is not Onnx.WHOLE:
            return {}
        with mmap(file.fileno(), 0, access=ACCESS_READ) as content:
            locations = sorted(set(_locations(content)))
    directories = (path.parent, path.resolve().parent)
    for location in locations:
        fault = path_fault(location)
        if not fault and not any(
            is_inside(path.parent / location, directory) for directory in directories
        ):
            fault = "it leads out of the model's directory"
        if fault:
            raise UnsafePath(
                f"{path.name} has weights in {shown(location)}, which is refused: {fault}. "
                "Save the model anew, with its weights in its own directory."
            )
    return {normal(location): path.parent / location for location in locations}


def _locations(content: mmap) -> Iterator[str]:
    """Yield the `location` of each tensor that lies in another file."""
    for match in _LOCATION.finditer(content):
        start, end = match.span()
        tag = start - 2  # The entry's length, a varint of one or two bytes, is between.
        if content[tag - (content[tag] >> 7)] == _EXTERNAL_DATA:
            content.seek(end)
            yield str(content.read(_varint(content) or 0), "utf-8", "surrogateescape")
