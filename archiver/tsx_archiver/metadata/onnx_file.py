"""Detects ONNX files, and finds the files beside them that hold their weights."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import BinaryIO

from tsx_archiver.errors import CorruptMember, UnsafePath
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

# For each message of onnx.proto, the fields that lead to tensors and to the names of their files.
_PARTS = {
    "ModelProto": {_GRAPH: "GraphProto", 25: "FunctionProto"},
    "GraphProto": {1: "NodeProto", 5: "TensorProto", 15: "SparseTensorProto"},
    "FunctionProto": {7: "NodeProto", 11: "AttributeProto"},
    "NodeProto": {5: "AttributeProto"},
    "AttributeProto": {
        5: "TensorProto",
        6: "GraphProto",
        10: "TensorProto",
        11: "GraphProto",
        22: "SparseTensorProto",
        23: "SparseTensorProto",
    },
    "SparseTensorProto": {1: "TensorProto", 2: "TensorProto"},
    "TensorProto": {13: "StringStringEntryProto"},
    "StringStringEntryProto": {},
}
_FIXED_SIZES = {1: 8, 5: 4}  # wire type -> bytes


class Onnx(enum.Enum):
    WHOLE = "whole"
    TRUNCATED = "truncated"
    NOT = "not"


def look_at_onnx(file: BinaryIO, size: int) -> Onnx:
    """Walk over the fields of the message, skipping their contents.

    Detects ONNX files, which have no magic number: the whole file must be a protobuf message with the fields of ModelProto.
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
    outside the model's directory, and CorruptMember.
    """
    with path.open("rb") as file:
        if look_at_onnx(file, file.seek(0, 2)) is not Onnx.WHOLE:
            return {}
        # A file's own `tell` is a system call, which would take most of the time.
        with mmap(file.fileno(), 0, access=ACCESS_READ) as content:
            locations = set(_locations(content, path.name))
    files, directories = {}, (path.parent, path.resolve().parent)
    for location in sorted(locations):
        file_path = path.parent / location
        fault = path_fault(location)
        if not fault and not any(is_inside(file_path, directory) for directory in directories):
            fault = "it leads out of the model's directory"
        if fault:
            raise UnsafePath(
                f"{path.name} has weights in {shown(location)}, which is refused: {fault}. "
                "Save the model anew, with its weights in its own directory."
            )
        files[normal(location)] = file_path
    return files


def _locations(file: mmap, name: str) -> Iterator[str]:
    """Yield the `location` of each tensor that lies in another file."""
    messages = [("ModelProto", 0, len(file))]
    while messages:
        message, start, end = messages.pop()
        file.seek(start)
        entry = {}
        while file.tell() < end:
            tag = _varint(file) or 0
            wire = tag & 7
            value = _FIXED_SIZES[wire] if wire in _FIXED_SIZES else _varint(file)
            start = file.tell()
            if value is None or wire not in (0, 1, 2, 5) or (wire and start + value > end):
                raise CorruptMember(f"{name} is a damaged ONNX model. Copy or download it again.")
            if not wire:
                continue
            if wire == 2 and message == "StringStringEntryProto":
                entry[tag >> 3] = file.read(value)
            elif wire == 2 and tag >> 3 in _PARTS[message]:
                messages.append((_PARTS[message][tag >> 3], start, start + value))
            file.seek(start + value)
        if entry.get(1) == b"location":
            yield str(entry.get(2, b""), "utf-8", "surrogateescape")
