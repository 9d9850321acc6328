"""Tensors of the Open Inference Protocol: from gRPC's messages to the form in which they travel to
a worker, and back.

That form is the one of the protocol's REST side, with its binary extension: a JSON head, whose
length is in a header, and behind it the raw bytes of each tensor whose `binary_data_size` the head
names. Numbers are never looked at one by one here.
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

LENGTH = struct.Struct("<I")  # before each element of BYTES
MOST_DIMENSIONS = 64  # as in torch and numpy
SIZE = "binary_data_size"


class ContentsField(NamedTuple):
    """Where the numbers of a data type are in `InferTensorContents`, and what `array` calls
    them.
    """

    field: str
    code: str


TYPED = {
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
}  # BYTES have a field too; FP16 and BF16 have none, and travel as raw contents only


def pack(request: Any) -> tuple[int, Body]:
    """A `ModelInferRequest` of either package as a worker reads it: the bytes of its JSON, and the
    body. Raises BadRequest.
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
        if len(tensor.shape) > MOST_DIMENSIONS:
            message = (
                f"The input {tensor.name[:100]!r} has {len(tensor.shape)} dimensions: a tensor has"
                f" at most {MOST_DIMENSIONS}."
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


def unpack(response: Any, head: int | None, body: bytes, *, typed: bool) -> None:
    """Fill a `ModelInferResponse` from a worker's answer; `typed` puts numbers into `contents`, as
    the request had them.

    An answer that is no tensors is one tensor of type BYTES. Raises PredictionFailed.
    """
    parsed, rest = _parsed_head(head, body)
    try:
        outputs = _outputs(parsed, rest)
        response.id = str(parsed.get("id") or response.id)
        _set_parameters(response.parameters, parsed.get("parameters") or {})
        typed = typed and all(
            output.datatype in TYPED or output.datatype == "BYTES" for output in outputs
        )
        for output in outputs:
            tensor = response.outputs.add(
                name=output.name, datatype=output.datatype, shape=output.shape
            )
            _set_parameters(tensor.parameters, output.parameters)
            if typed:
                unpack_contents(tensor.contents, output.datatype, output.raw)
            else:
                response.raw_output_contents.append(output.raw)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError, struct.error) as error:
        raise PredictionFailed(
            f"The handler returned outputs that are not tensors: {type(error).__name__}: {error}."
        ) from error


def pack_contents(tensor: Any) -> bytes:
    """The numbers of an input's `contents` as raw bytes."""
    name, datatype = tensor.name, tensor.datatype
    field = (
        "bytes_contents"
        if datatype == "BYTES"
        else TYPED[datatype].field
        if datatype in TYPED
        else None
    )
    if field is None:
        known = ", ".join([*TYPED, "BYTES"])
        raise BadRequest(
            f"The input {name!r} is of type {datatype!r}: contents take {known}, and"
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
        return _little(array(TYPED[datatype].code, values)).tobytes()
    except OverflowError as error:
        raise BadRequest(
            f"The input {name!r} contains a value that is not {datatype}: {error}."
        ) from error


def unpack_contents(contents: Any, datatype: str, raw: bytes) -> None:
    if datatype == "BYTES":
        contents.bytes_contents.extend(unpack_bytes(raw))
        return
    form = TYPED[datatype]
    values = array(form.code)
    values.frombytes(raw)
    numbers: Iterable[Any] = map(bool, values) if datatype == "BOOL" else _little(values)
    getattr(contents, form.field).extend(numbers)


def pack_bytes(values: Iterable[bytes]) -> bytes:
    return b"".join([part for value in values for part in (LENGTH.pack(len(value)), value)])


def unpack_bytes(raw: bytes) -> list[bytes]:
    """Raises PredictionFailed."""
    values, at = [], 0
    while at < len(raw):
        end = at + LENGTH.size
        length = LENGTH.unpack_from(raw, at)[0] if end <= len(raw) else len(raw)
        if end + length > len(raw):
            raise PredictionFailed("The handler answered BYTES whose lengths do not add up.")
        values.append(raw[end : end + length])
        at = end + length
    return values


def parameters(given: Mapping[str, Any]) -> dict[str, Any]:
    """A map of `InferParameter` as JSON."""
    return {
        name: getattr(value, choice)
        for name, value in given.items()
        if (choice := value.WhichOneof("parameter_choice"))
    }


def _input(tensor: Any, size: int) -> dict[str, Any]:
    return {
        "name": tensor.name,
        "datatype": tensor.datatype,
        "shape": list(tensor.shape),
        "parameters": {**parameters(tensor.parameters), SIZE: size},
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


def _parsed_head(head: int | None, body: bytes) -> tuple[dict[str, Any], memoryview]:
    """The JSON of an answer, and the raw bytes behind it."""
    view = memoryview(body)
    length = len(body) if head is None else head
    try:
        parsed = json.loads(bytes(view[:length]))
        if isinstance(parsed["outputs"], list):
            return parsed, view[length:]
    except (ValueError, KeyError, TypeError, RecursionError):
        pass
    raw = pack_bytes([body])
    output = {"name": "output", "datatype": "BYTES", "shape": [1], "parameters": {SIZE: len(raw)}}
    return {"outputs": [output]}, memoryview(raw)


class _Output(NamedTuple):
    """One tensor of an answer."""

    name: str
    datatype: str
    shape: list[int]
    parameters: dict[str, Any]
    raw: bytes


def _outputs(parsed: dict[str, Any], rest: memoryview) -> list[_Output]:
    outputs, at = [], 0
    for output in parsed["outputs"]:
        others = dict(output.get("parameters") or {})
        size = others.pop(SIZE, None)
        if size is not None and not 0 <= size <= len(rest) - at:
            raise ValueError(f"{SIZE} is {size}, but {len(rest) - at} bytes are left")
        raw = (
            _pack_values(output["datatype"], output["data"])
            if size is None
            else bytes(rest[at : at + size])
        )
        at += size or 0
        outputs.append(
            _Output(output["name"], output["datatype"], list(output["shape"]), others, raw)
        )
    return outputs


def _pack_values(datatype: str, values: list[Any]) -> bytes:
    """Numbers as a handler wrote them in JSON."""
    if datatype == "BYTES":
        return pack_bytes([value.encode() for value in values])
    return _little(array(TYPED[datatype].code, values)).tobytes()


def _little(values: array[Any]) -> array[Any]:
    if sys.byteorder == "big":
        values.byteswap()
    return values
