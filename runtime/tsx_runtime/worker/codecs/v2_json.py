"""Tensors in the JSON of the Open Inference Protocol.

A tensor has a name, a shape, a datatype and flat numbers.
https://github.com/kserve/open-inference-protocol/blob/main/specification/protocol/inference_rest.md
"""

from __future__ import annotations

import base64
import math
from collections.abc import Iterator
from typing import Any

DATATYPES = {
    "bool": "BOOL",
    "uint8": "UINT8",
    "uint16": "UINT16",
    "uint32": "UINT32",
    "uint64": "UINT64",
    "int8": "INT8",
    "int16": "INT16",
    "int32": "INT32",
    "int64": "INT64",
    "float16": "FP16",
    "bfloat16": "BF16",
    "float32": "FP32",
    "float64": "FP64",
}
MAX_DIMENSIONS = 64  # the limit of numpy
KNOWN = frozenset(DATATYPES.values()) | {"BYTES"}


class MalformedTensors(ValueError):
    """The error of a request without its protocol's form; the message is for the client."""


def read_input(entry: Any) -> dict[str, Any]:
    """Return the entry with `data` nested by its `shape`.

    A single text, or run of bytes, is not nested.
    """
    if not isinstance(entry, dict) or not {"name", "shape", "datatype", "data"} <= set(entry):
        raise MalformedTensors("Each input needs name, shape, datatype and data.")
    if hasattr(entry["data"], "dtype"):  # It came as bytes, and is an array of that shape already.
        return entry
    name, datatype = str(entry["name"]), entry["datatype"]
    if datatype not in KNOWN:
        raise MalformedTensors(
            f"Input {name!r} has the datatype {datatype!r}; known are {', '.join(sorted(KNOWN))}."
        )
    flat = list(_flat(entry["data"])) if isinstance(entry["data"], list) else [entry["data"]]
    shape = _full_shape(name, entry["shape"], len(flat))
    data = flat[0] if datatype == "BYTES" and len(flat) == 1 else _nest(flat, shape)
    return {**entry, "data": data}


def output_tensor(name: str, value: Any) -> dict[str, Any]:
    """Return a tensor from an array, or from numbers and texts in lists.

    Any other value becomes one row of BYTES.
    """
    if hasattr(value, "dtype") and hasattr(value, "tolist"):
        kind = str(value.dtype).rpartition(".")[2]
        if kind in DATATYPES:
            plain = value.tolist()
            data = list(_flat(plain)) if isinstance(plain, list) else [plain]
            return {
                "name": name,
                "shape": list(value.shape),
                "datatype": DATATYPES[kind],
                "data": data,
            }
        value = value.tolist()
    shape = _shape(value) if isinstance(value, list) else [1]
    data = [_plain(entry) for entry in (_flat(value) if isinstance(value, list) else [value])]
    if len(data) != math.prod(shape):  # Lists of different lengths are no tensor.
        shape = [len(data)]
    return {"name": name, "shape": shape, "datatype": _datatype(data), "data": data}


def _flat(value: Any) -> Iterator[Any]:
    for entry in value:
        if isinstance(entry, list):
            yield from _flat(entry)
        else:
            yield entry


def _shape(value: Any) -> list[int]:
    shape = []
    while isinstance(value, list):
        shape.append(len(value))
        value = value[0] if value else None
    return shape


def _full_shape(name: str, shape: Any, count: int) -> list[int]:
    """Return the shape, in which one -1 is replaced by the remaining size."""
    sizes = (
        shape
        if isinstance(shape, list) and all(type(size) is int and size >= -1 for size in shape)
        else None
    )
    if sizes is None or sizes.count(-1) > 1 or len(sizes) > MAX_DIMENSIONS:
        raise MalformedTensors(
            f"Input {name!r} has the shape {shape!r:.200}; it must be a list of sizes,"
            f" {MAX_DIMENSIONS} at most."
        )
    if -1 in sizes:
        known = math.prod(size for size in sizes if size != -1)
        sizes = [size if size != -1 else (count // known if known else 0) for size in sizes]
    if math.prod(sizes) != count:
        raise MalformedTensors(
            f"Input {name!r} of shape {shape} must have {math.prod(sizes)} values; it has {count}."
        )
    return sizes


def _nest(flat: list[Any], shape: list[int]) -> Any:
    if not shape:
        return flat[0]
    rows = flat
    for size in reversed(shape[1:]):
        rows = [rows[start : start + size] for start in range(0, len(rows), size)] if size else []
    return rows


def _plain(value: Any) -> Any:
    if isinstance(value, bytes | bytearray):
        try:
            return value.decode()
        except UnicodeDecodeError:
            return base64.b64encode(value).decode()
    return value


def _datatype(data: list[Any]) -> str:
    kinds = {type(value) for value in data}
    if kinds == {bool}:
        return "BOOL"
    if kinds == {int}:
        return "INT64"
    return "FP64" if kinds <= {int, float} else "BYTES"
