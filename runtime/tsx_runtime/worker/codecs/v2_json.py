"""Tensors in the JSON of the Open Inference Protocol.

A tensor has a name, a shape, a datatype and a flat list of values.
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
KNOWN_DATATYPES = frozenset(DATATYPES.values()) | {"BYTES"}


class MalformedTensors(ValueError):
    """The error for a request that does not follow its protocol; the message is for the client."""


def read_input(entry: Any) -> dict[str, Any]:
    """Return a tensor whose `data` is nested according to its `shape`.

    A BYTES tensor with a single value is not nested.
    """
    if not isinstance(entry, dict) or not {"name", "shape", "datatype", "data"} <= set(entry):
        raise MalformedTensors("Each input needs name, shape, datatype and data.")
    if hasattr(entry["data"], "dtype"):  # It was binary, and already is an array of that shape.
        return entry
    name, datatype = str(entry["name"]), entry["datatype"]
    if not isinstance(datatype, str) or datatype not in KNOWN_DATATYPES:
        raise MalformedTensors(
            f"Input {name!r} has the datatype {datatype!r:.200}; known are"
            f" {', '.join(sorted(KNOWN_DATATYPES))}."
        )
    values = (
        list(_iterate_values(entry["data"])) if isinstance(entry["data"], list) else [entry["data"]]
    )
    shape = _complete_shape(name, entry["shape"], len(values))
    data = values[0] if datatype == "BYTES" and len(values) == 1 else _nest(values, shape)
    return {**entry, "data": data}


def output_tensor(name: str, value: Any) -> dict[str, Any]:
    """Return the tensor of an array, or of lists of numbers and texts.

    Any other value becomes a BYTES tensor of one element.
    """
    if hasattr(value, "dtype") and hasattr(value, "tolist"):
        dtype = str(value.dtype).rpartition(".")[2]
        if dtype in DATATYPES:
            nested_values = value.tolist()
            data = (
                list(_iterate_values(nested_values))
                if isinstance(nested_values, list)
                else [nested_values]
            )
            return {
                "name": name,
                "shape": list(value.shape),
                "datatype": DATATYPES[dtype],
                "data": data,
            }
        value = value.tolist()
    shape = _infer_shape(value) if isinstance(value, list) else [1]
    data = [
        _as_json_value(entry)
        for entry in (_iterate_values(value) if isinstance(value, list) else [value])
    ]
    if len(data) != math.prod(shape):  # The nested lists differ in length.
        shape = [len(data)]
    return {"name": name, "shape": shape, "datatype": _infer_datatype(data), "data": data}


def _iterate_values(value: Any) -> Iterator[Any]:
    for entry in value:
        if isinstance(entry, list):
            yield from _iterate_values(entry)
        else:
            yield entry


def _infer_shape(value: Any) -> list[int]:
    shape = []
    while isinstance(value, list):
        shape.append(len(value))
        value = value[0] if value else None
    return shape


def _complete_shape(name: str, shape: Any, count: int) -> list[int]:
    """Return the shape; one -1 in it is replaced by the size that fits the number of values."""
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
        known_size = math.prod(size for size in sizes if size != -1)
        sizes = [
            size if size != -1 else (count // known_size if known_size else 0) for size in sizes
        ]
    if math.prod(sizes) != count:
        raise MalformedTensors(
            f"Input {name!r} of shape {shape} must have {math.prod(sizes)} values; it has {count}."
        )
    return sizes


def _nest(values: list[Any], shape: list[int]) -> Any:
    if not shape:
        return values[0]
    rows = values
    for size in reversed(shape[1:]):
        rows = [rows[start : start + size] for start in range(0, len(rows), size)] if size else []
    return rows


def _as_json_value(value: Any) -> Any:
    if isinstance(value, bytes | bytearray):
        try:
            return value.decode()
        except UnicodeDecodeError:
            return base64.b64encode(value).decode()
    return value


def _infer_datatype(data: list[Any]) -> str:
    kinds = {type(value) for value in data}
    if kinds == {bool}:
        return "BOOL"
    if kinds == {int}:
        return "INT64"
    return "FP64" if kinds <= {int, float} else "BYTES"
