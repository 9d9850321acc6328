"""The conversion of tensors between the Open Inference Protocol's gRPC and REST formats.

A worker gets the REST format with binary data. It is a JSON head, whose length is in a header, and
the raw bytes of each tensor whose `binary_data_size` is in the head. Raw numbers are copied without
being parsed.
"""

from __future__ import annotations

import json
import struct
import sys
from array import array
from collections.abc import Iterable, Mapping
from math import prod
from typing import Any, NamedTuple

from tsx_runtime.errors import BadRequest, PredictionFailed
from tsx_runtime.wire import MAX_COPIED_BYTES, Body, Buffer, Parts

ELEMENT_LENGTH = struct.Struct("<I")  # precedes each element of BYTES
MAX_DIMENSIONS = 64  # the limit of torch and numpy
SIZE_PARAMETER = "binary_data_size"


class ContentsField(NamedTuple):
    """The field of `InferTensorContents` for a data type, and its type code in `array`."""

    field: str
    code: str


# BYTES also has a field. FP16 and BF16 have none, and can be sent only as raw contents.
CONTENTS_FIELDS = {
    "BOOL": ContentsField("bool_contents", "b"),
    "INT8": ContentsField("int_contents", "b"),
    "INT16": ContentsField("int_contents", "h"),
    "INT32": ContentsField("int_contents", "i"),
    "INT64": ContentsField("int64_contents", "q"),
    "UINT8": ContentsField("uint_contents", "B"),
    "UINT16": ContentsField("uint_contents", "H"),
    "UINT32": ContentsField("uint_contents", "I"),
    "UINT64": ContentsField("uint64_contents", "Q"),
    "FP32": ContentsField("fp32_contents", "f"),
    "FP64": ContentsField("fp64_contents", "d"),
}


def pack(request: Any) -> tuple[int, Body]:
    """Convert a `ModelInferRequest` to the length of the JSON head, and the body for a worker.

    Raises:
        BadRequest: The tensors are inconsistent.
    """
    if request.raw_input_contents:
        if len(request.raw_input_contents) != len(request.inputs):
            raise BadRequest(
                f"{len(request.raw_input_contents)} raw_input_contents do not fit"
                f" {len(request.inputs)} inputs: one each."
            )
        for tensor in request.inputs:
            if tensor.HasField("contents"):
                raise BadRequest(
                    f"The input {tensor.name!r} has contents although the request has"
                    " raw_input_contents: send only one of them."
                )
        raw: list[bytes] = list(request.raw_input_contents)
    else:
        raw = [pack_contents(tensor) for tensor in request.inputs]
    for tensor in request.inputs:
        if len(tensor.shape) > MAX_DIMENSIONS:
            message = (
                f"The input {tensor.name[:100]!r} has {len(tensor.shape)} dimensions: a tensor has"
                f" at most {MAX_DIMENSIONS}."
            )
            raise BadRequest(message)
    head = {
        "id": request.id,
        "parameters": {**parameters(request.parameters), "binary_data_output": True},
        "inputs": [
            _input(tensor, len(data)) for tensor, data in zip(request.inputs, raw, strict=True)
        ],
    }
    if request.outputs:
        head["outputs"] = [
            {"name": output.name, "parameters": parameters(output.parameters)}
            for output in request.outputs
        ]
    text = json.dumps(head).encode()
    pieces: list[Buffer] = [text, *raw]
    size = sum(map(len, pieces))
    return len(text), (
        Parts(pieces, size) if size > MAX_COPIED_BYTES and len(pieces) <= 1024 else b"".join(pieces)
    )


def unpack(response: Any, head: int | None, body: bytes, *, use_contents: bool) -> None:
    """Fill a `ModelInferResponse` from a worker's response.

    A body that is not in the protocol's format becomes one tensor of type BYTES.

    Args:
        response: The message to fill.
        head: The length of the JSON head, or None without tensors.
        body: The body of the worker's response.
        use_contents: Whether to put numbers into `contents`, as in the request.

    Raises:
        PredictionFailed: The outputs are not valid tensors.
    """
    response_head, binary = _parse_head(head, body)
    try:
        outputs = _read_outputs(response_head, binary)
        response.id = str(response_head.get("id") or response.id)
        _set_parameters(response.parameters, response_head.get("parameters") or {})
        use_contents = use_contents and all(
            output.datatype in CONTENTS_FIELDS or output.datatype == "BYTES" for output in outputs
        )
        for output in outputs:
            tensor = response.outputs.add(
                name=output.name, datatype=output.datatype, shape=output.shape
            )
            _set_parameters(tensor.parameters, output.parameters)
            if use_contents:
                unpack_contents(tensor.contents, output.datatype, output.raw)
            else:
                response.raw_output_contents.append(output.raw)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError, struct.error) as error:
        raise PredictionFailed(
            f"The handler returned outputs that are not tensors: {type(error).__name__}: {error}."
        ) from error


def pack_contents(tensor: Any) -> bytes:
    """Return the numbers of an input's `contents` as raw bytes."""
    name, datatype = tensor.name, tensor.datatype
    field = (
        "bytes_contents"
        if datatype == "BYTES"
        else CONTENTS_FIELDS[datatype].field
        if datatype in CONTENTS_FIELDS
        else None
    )
    if field is None:
        datatypes = ", ".join([*CONTENTS_FIELDS, "BYTES"])
        raise BadRequest(
            f"The input {name!r} is of type {datatype!r}: contents take {datatypes}, and"
            " raw_input_contents FP16 and BF16 as well."
        )
    values = getattr(tensor.contents, field)
    if len(values) != prod(tensor.shape):
        raise BadRequest(
            f"The input {name!r} has {len(values)} elements in {field}, but its shape"
            f" {list(tensor.shape)} has {prod(tensor.shape)}."
        )
    if datatype == "BYTES":
        return pack_bytes(values)
    try:
        return _little_endian(array(CONTENTS_FIELDS[datatype].code, values)).tobytes()
    except OverflowError as error:
        raise BadRequest(
            f"The input {name!r} contains a value that is not {datatype}: {error}."
        ) from error


def unpack_contents(contents: Any, datatype: str, raw: bytes) -> None:
    if datatype == "BYTES":
        contents.bytes_contents.extend(unpack_bytes(raw))
        return
    contents_field = CONTENTS_FIELDS[datatype]
    values = array(contents_field.code)
    values.frombytes(raw)
    numbers: Iterable[Any] = map(bool, values) if datatype == "BOOL" else _little_endian(values)
    getattr(contents, contents_field.field).extend(numbers)


def pack_bytes(values: Iterable[bytes]) -> bytes:
    return b"".join([part for value in values for part in (ELEMENT_LENGTH.pack(len(value)), value)])


def unpack_bytes(raw: bytes) -> list[bytes]:
    """Return the elements of a BYTES tensor.

    Raises:
        PredictionFailed: The lengths of the elements exceed the bytes.
    """
    values, at = [], 0
    while at < len(raw):
        end = at + ELEMENT_LENGTH.size
        length = ELEMENT_LENGTH.unpack_from(raw, at)[0] if end <= len(raw) else len(raw)
        if end + length > len(raw):
            raise PredictionFailed("The handler answered BYTES whose lengths do not add up.")
        values.append(raw[end : end + length])
        at = end + length
    return values


def parameters(parameter_map: Mapping[str, Any]) -> dict[str, Any]:
    """Return a map of `InferParameter` as JSON values."""
    return {
        name: getattr(value, choice)
        for name, value in parameter_map.items()
        if (choice := value.WhichOneof("parameter_choice"))
    }


def _input(tensor: Any, size: int) -> dict[str, Any]:
    return {
        "name": tensor.name,
        "datatype": tensor.datatype,
        "shape": list(tensor.shape),
        "parameters": {**parameters(tensor.parameters), SIZE_PARAMETER: size},
    }


def _set_parameters(target: Any, values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        if isinstance(value, bool):
            target[name].bool_param = value
        elif isinstance(value, int) and -(1 << 63) <= value < 1 << 63:
            target[name].int64_param = value
        elif isinstance(value, float):
            target[name].double_param = value
        else:
            target[name].string_param = value if isinstance(value, str) else json.dumps(value)


def _parse_head(head: int | None, body: bytes) -> tuple[dict[str, Any], memoryview]:
    """Return the JSON of a response, and the raw bytes that follow it."""
    view = memoryview(body)
    length = len(body) if head is None else head
    try:
        response_head = json.loads(bytes(view[:length]))
        if isinstance(response_head["outputs"], list):
            return response_head, view[length:]
    except (ValueError, KeyError, TypeError, RecursionError):
        pass
    packed = pack_bytes([body])
    output = {
        "name": "output",
        "datatype": "BYTES",
        "shape": [1],
        "parameters": {SIZE_PARAMETER: len(packed)},
    }
    return {"outputs": [output]}, memoryview(packed)


class _Output(NamedTuple):
    """One tensor of a response."""

    name: str
    datatype: str
    shape: list[int]
    parameters: dict[str, Any]
    raw: bytes


def _read_outputs(response_head: dict[str, Any], binary: memoryview) -> list[_Output]:
    outputs, at = [], 0
    for output in response_head["outputs"]:
        output_parameters = dict(output.get("parameters") or {})
        size = output_parameters.pop(SIZE_PARAMETER, None)
        if size is not None and not 0 <= size <= len(binary) - at:
            raise ValueError(f"{SIZE_PARAMETER} is {size}, but {len(binary) - at} bytes are left")
        raw = (
            _pack_values(output["datatype"], output["data"])
            if size is None
            else bytes(binary[at : at + size])
        )
        at += size or 0
        outputs.append(
            _Output(
                output["name"], output["datatype"], list(output["shape"]), output_parameters, raw
            )
        )
    return outputs


def _pack_values(datatype: str, values: list[Any]) -> bytes:
    """Return numbers from a handler's JSON as raw bytes."""
    if datatype == "BYTES":
        return pack_bytes([value.encode() for value in values])
    return _little_endian(array(CONTENTS_FIELDS[datatype].code, values)).tobytes()


def _little_endian(values: array[Any]) -> array[Any]:
    if sys.byteorder == "big":
        values.byteswap()
    return values
