"""ONNX files: their detection, and the separate files of their weights."""

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
# The wire types of the fields of onnx.ModelProto, from the file onnx.proto.
_FIELDS = dict.fromkeys((1, 5), 0) | dict.fromkeys((2, 3, 4, 6, 14, 20, 25, 26), 2)
_FIELDS |= {_GRAPH: 2, _OPSET_IMPORT: 2}
_MAX_FIELDS = 100_000

# The start of an entry `location` of protobuf's type StringStringEntryProto.
_LOCATION = re.compile(rb"\n\x08location\x12")
_EXTERNAL_DATA = 13 << 3 | 2  # the tag of the field external_data of a tensor


class Onnx(enum.Enum):
    """The result of `detect_onnx`: a whole ONNX model, the beginning of one, or another file."""

    WHOLE = "whole"
    TRUNCATED = "truncated"
    OTHER = "other"


def detect_onnx(file: BinaryIO, size: int) -> Onnx:
    """Tell whether a file is an ONNX model.

    ONNX files have no magic number. Therefore the file must be a protobuf message with the fields
    of ModelProto, whose contents are skipped.
    """
    file.seek(0)
    field_numbers: set[int] = set()
    for _ in range(_MAX_FIELDS):
        if file.tell() == size:
            return Onnx.WHOLE if {_GRAPH, _OPSET_IMPORT} <= field_numbers else Onnx.OTHER
        tag = _varint(file)
        if tag is None:
            return Onnx.TRUNCATED if field_numbers else Onnx.OTHER
        number, wire = tag >> 3, tag & 7
        if _FIELDS.get(number) != wire:
            return Onnx.OTHER
        value = _varint(file)
        if value is None:
            return Onnx.TRUNCATED
        if wire == 2:
            if file.tell() + value > size:
                return Onnx.TRUNCATED
            file.seek(value, 1)
        field_numbers.add(number)
    return Onnx.OTHER


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
    """Return the external weight files of an ONNX model, by their paths relative to the model.

    The files may be missing. A model of another kind has none.

    Raises:
        UnsafePath: A file lies outside the model's directory.
    """
    with path.open("rb") as file:
        if detect_onnx(file, file.seek(0, 2)) is not Onnx.WHOLE:
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
        # The entry's length, a varint of one or two bytes, is between the tag and the match.
        tag = start - 2
        if content[tag - (content[tag] >> 7)] == _EXTERNAL_DATA:
            content.seek(end)
            yield str(content.read(_varint(content) or 0), "utf-8", "surrogateescape")
