"""Tensors of the Open Inference Protocol with its binary extension.

The module converts requests to arrays, and results to responses. A binary body is JSON, followed by
the bytes of the tensors that have a `binary_data_size` in the JSON. A header gives the length of
the JSON. Requests of gRPC's ModelInfer arrive in the same form.

A handler gets the JSON as the dict `body`, with an array in each `data`. It may return arrays,
numbers, text or JSON, which all become tensors.
"""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, Any, TypeAlias

from tsx_runtime.errors import BadRequest, PredictionFailed
from tsx_runtime.wire import TENSORS_HEAD
from tsx_runtime.worker.codecs.json_text import NULL, RelayedRows, to_compact_json

if TYPE_CHECKING:
    import numpy as np

    from tsx_runtime.worker.handler_api.context import Context

JsonObject: TypeAlias = dict[str, Any]

SIZE_PARAMETER = "binary_data_size"
DEFAULT_OUTPUT_NAME = "output"  # the name of a result without names
MAX_EMPTY_LISTS = 1_000_000
MAX_LENGTH_DIGITS = 20  # A limit, since `int` raises an error for thousands of digits.

ELEMENT_LENGTH = struct.Struct("<I")  # precedes each element of BYTES
# numpy has no BYTES and no BF16, which are handled separately.
DTYPES = {
    "BOOL": "?",
    "INT8": "<i1",
    "INT16": "<i2",
    "INT32": "<i4",
    "INT64": "<i8",
    "UINT8": "<u1",
    "UINT16": "<u2",
    "UINT32": "<u4",
    "UINT64": "<u8",
    "FP16": "<f2",
    "FP32": "<f4",
    "FP64": "<f8",
}
_DATATYPES = {dtype.lstrip("<"): datatype for datatype, dtype in DTYPES.items()} | {"b1": "BOOL"}


class OutputRequest(dict[str, dict[str, str]]):
    """The outputs that a request asks for.

    Contexts and batches carry it in place of the part headers, which only forms have.

    Attributes:
        parameters: The parameters of the request.
        id: The id of the request.
        outputs: The name of each output, and whether it is sent as bytes; empty for all outputs.
        binary: Whether outputs without a setting of their own are sent as bytes.
    """

    def __init__(
        self, id: str | None, outputs: list[tuple[str, bool]], binary: bool, parameters: Any = None
    ) -> None:
        super().__init__()
        self.parameters = parameters
        self.id = id
        self.outputs = outputs
        self.binary = binary

    def __bool__(self) -> bool:
        return True


class Tensors(JsonObject):
    """A request in the binary form."""


def output_request_of_json(request: JsonObject) -> OutputRequest | None:
    """Return the output request of a request that is only JSON, if it asks for binary outputs.

    Return None for all others, even if their parameters are invalid.
    """
    try:
        output_request = parse_output_request(request)
    except BadRequest:
        return None
    return (
        output_request
        if output_request.binary or any(binary for _, binary in output_request.outputs)
        else None
    )


def read(json_length: str, body: bytearray) -> tuple[JsonObject, OutputRequest]:
    """Return the request, with its tensors as arrays in `data`, and its output request.

    Args:
        json_length: The value of the header: the number of bytes of JSON.
        body: The JSON and the bytes of the tensors.

    Raises:
        BadRequest: The request does not have this form.
    """
    if not (
        json_length.isdecimal()
        and len(json_length) <= MAX_LENGTH_DIGITS
        and 0 < int(json_length) <= len(body)
    ):
        raise BadRequest(
            f"The header {TENSORS_HEAD.decode()} is {json_length[:40]!r}: it takes the number of"
            " bytes of JSON that the body begins with."
        )
    try:
        request = json.loads(str(body[: int(json_length)], "utf-8"))
        inputs = request["inputs"]
        if not isinstance(inputs, list):
            raise TypeError(f"its inputs are {type(inputs).__name__}")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise BadRequest(
            f"The request does not begin with JSON that has a list of inputs: {error}."
        ) from error
    tensor_bytes, position = memoryview(body)[int(json_length) :], 0
    for tensor in inputs:
        position = _read_input(tensor, tensor_bytes, position)
    if position != len(tensor_bytes):
        raise BadRequest(
            f"{len(tensor_bytes)} bytes follow the JSON, but the {SIZE_PARAMETER} of its inputs add"
            f" up to {position}."
        )
    return Tensors(request), parse_output_request(request)


def _read_input(tensor: Any, raw: memoryview, start: int) -> int:
    """Put the bytes of a tensor, which begin at `start`, into its `data`; return their end."""
    try:
        size = (tensor.get("parameters") or {}).get(SIZE_PARAMETER)
        if size is None:
            return start
        end = start + int(size)
        if not start <= end <= len(raw):
            raise ValueError(f"its {end - start} bytes are missing")
        tensor["data"] = array_of(
            tensor["datatype"], [int(length) for length in tensor["shape"]], raw[start:end]
        )
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as error:
        name = tensor.get("name") if isinstance(tensor, dict) else tensor
        raise BadRequest(
            f"The input {name!r:.200} cannot be read: {type(error).__name__}: {error}."
        ) from error
    return end


def array_of(datatype: str, shape: list[int], raw: memoryview) -> Any:
    """Return an array that shares the memory of `raw`, or a list for BYTES.

    Raises:
        ValueError: The bytes do not fit the datatype and shape.
    """
    import numpy as np  # Most workers never get a tensor.

    if datatype == "BYTES":
        return read_bytes(raw, prod(shape))
    check_empty_shape(shape)
    if datatype == "BF16":
        bits = np.frombuffer(raw, "<u2").astype("<u4")
        return (bits << 16).view("<f4").reshape(shape).view(_list_like_class())
    if datatype not in DTYPES:
        raise ValueError(
            f"there is no datatype {datatype!r}; there are {', '.join(DTYPES)}, BF16 and BYTES"
        )
    return np.frombuffer(raw, DTYPES[datatype]).reshape(shape).view(_list_like_class())


def check_empty_shape(shape: Sequence[int]) -> None:
    """Refuse an array without elements whose nested lists would fill the memory.

    Raises:
        ValueError: The lists are too many.
    """
    if 0 in shape and prod(shape[: shape.index(0)]) > MAX_EMPTY_LISTS:
        raise ValueError(f"an array of shape {tuple(shape)!r:.200} has no elements but many lists")


def read_bytes(raw: memoryview, count: int) -> list[bytes]:
    """Read the elements of a BYTES tensor.

    Raises:
        ValueError: The lengths or the number of the elements are wrong.
    """
    values, position = [], 0
    while position < len(raw):
        (length,) = (
            ELEMENT_LENGTH.unpack_from(raw, position)
            if position + ELEMENT_LENGTH.size <= len(raw)
            else (len(raw),)
        )
        position += ELEMENT_LENGTH.size + length
        if position > len(raw):
            raise ValueError("the lengths of its elements do not add up")
        values.append(bytes(raw[position - length : position]))
    if len(values) != count:
        raise ValueError(f"it has {len(values)} elements, and its shape {count}")
    return values


def row_of_tensors(inputs: JsonObject) -> JsonObject:
    """Return the row for a handler without an envelope.

    Each tensor becomes an input with its name. The first one is also `body`, unless a tensor is
    named `data` or `body`, which handlers read. A BYTES tensor of one element becomes that element,
    like a field of a form. A body that is only JSON is left unchanged.
    """
    request = inputs["body"]
    if not isinstance(request, Tensors):
        return inputs
    row = {name: value for name, value in inputs.items() if name != "body"}
    for tensor in request["inputs"]:
        value = tensor.get("data")
        is_single = (
            tensor.get("datatype") == "BYTES"
            and isinstance(value, list)
            and len(value) == 1
            and isinstance(value[0], bytes)
        )
        row[str(tensor.get("name"))] = bytearray(value[0]) if is_single else value
    if row and "data" not in row and "body" not in row:
        row["body"] = next(iter(row.values()))
    return row


def tensor_responses(
    results: list[Any],
    output_requests: Mapping[int, Any],
    context: Context,
    version: str,
    started_responses: Collection[int],
) -> list[Any]:
    """Wrap each result whose request had tensors in a `TensorResponse`.

    The result of a response that has started to stream is left unchanged.
    """
    return [
        (
            TensorResponse(value, output_request, idx, context, version)
            if isinstance(output_request := output_requests.get(idx), OutputRequest)
            and idx not in started_responses
            and not isinstance(value, RelayedRows)
            else value
        )
        for idx, value in enumerate(results)
    ]


class TensorResponse:
    """A response that `encode` turns into tensors. An error there fails only this response."""

    def __init__(
        self, value: Any, output_request: OutputRequest, idx: int, context: Context, version: str
    ) -> None:
        self._value = value
        self._output_request = output_request
        self._idx = idx
        self._context = context
        self._version = version

    def encode(self, nan: str = NULL) -> bytes:
        """Return the body, and set its headers in the context.

        Raises:
            PredictionFailed: The value cannot be written as the requested tensors.
        """
        context, output_request = self._context, self._output_request
        # With an error status, the value is the handler's own error message.
        if context.get_response_status(self._idx)[0] >= 400:
            return self._value if isinstance(self._value, bytes) else str(self._value).encode()
        response = as_response(self._value, output_request, nan)
        fields = {
            "model_name": context.model_name,
            "model_version": self._version,
            "id": output_request.id or "",
            **response,
        }
        if not fields["id"]:
            del fields["id"]
        binary = dict(output_request.outputs)
        raw: list[bytes] = []
        fields["outputs"] = [
            _write_output(output, binary.get(output["name"], output_request.binary), raw)
            for output in response["outputs"]
        ]
        json_bytes = to_compact_json(fields, nan).encode()
        if not raw:
            context.set_response_content_type(self._idx, "application/json")
            return json_bytes
        context.set_response_content_type(self._idx, "application/octet-stream")
        context.set_response_header(
            self._idx, "Inference-Header-Content-Length", str(len(json_bytes))
        )
        return b"".join([json_bytes, *raw])


def as_response(value: Any, output_request: OutputRequest, nan: str = NULL) -> JsonObject:
    """Return the protocol's response with the requested outputs.

    Each output's `data` is an array, or a list of bytes for BYTES.
    """
    response = _parse_complete_response(value)
    outputs = (
        [_convert_output(output) for output in response["outputs"]]
        if response
        else _make_outputs(value, output_request, nan)
    )
    if output_request.outputs:
        by_name = {output["name"]: output for output in outputs}
        missing = [name for name, _ in output_request.outputs if name not in by_name]
        if missing:
            raise PredictionFailed(
                f"The model has no output {missing[0]!r}; its outputs are"
                f" {', '.join(by_name) or 'none'}."
            )
        outputs = [by_name[name] for name, _ in output_request.outputs]
    return {**(response or {}), "outputs": outputs}


def _parse_complete_response(value: Any) -> JsonObject | None:
    """Return a result of the handler or the envelope if it already is a complete response."""
    if isinstance(value, str | bytes | bytearray):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return None
    if not isinstance(value, dict) or not isinstance(outputs := value.get("outputs"), list):
        return None
    is_complete = all(
        isinstance(output, dict) and {"name", "datatype", "shape", "data"} <= output.keys()
        for output in outputs
    )
    return dict(value) if is_complete else None


def _convert_output(output: JsonObject) -> JsonObject:
    """Return an output that the handler wrote itself, with its `data` as an array."""
    import numpy as np

    datatype, data = output["datatype"], output["data"]
    try:
        if datatype == "BYTES":
            values: Any = [
                value.encode() if isinstance(value, str) else bytes(value)
                for value in _iterate_values(data)
            ]
        elif datatype == "BF16":
            values = np.asarray(data, "<f4")
        else:
            values = np.asarray(data, DTYPES[datatype])
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise PredictionFailed(
            f"The output {output['name']!r} of the handler is not a tensor of {datatype}: {error}."
        ) from error
    return {**output, "data": values}


def _make_outputs(value: Any, output_request: OutputRequest, nan: str) -> list[JsonObject]:
    """Return one tensor, or one tensor for each entry of a dict of arrays.

    A single tensor gets the requested name.
    """
    if isinstance(value, dict) and value and all(_is_array(entry) for entry in value.values()):
        return [_make_output(str(name), entry, nan) for name, entry in value.items()]
    return [
        _make_output(
            output_request.outputs[0][0]
            if len(output_request.outputs) == 1
            else DEFAULT_OUTPUT_NAME,
            value,
            nan,
        )
    ]


def _make_output(name: str, value: Any, nan: str) -> JsonObject:
    array = _as_array(value)
    if array is None:
        text = (
            value
            if isinstance(value, bytes | bytearray)
            else value.encode()
            if isinstance(value, str)
            else _write_json(value, nan)
        )
        return {"name": name, "datatype": "BYTES", "shape": [1], "data": [bytes(text)]}
    if array.dtype.kind == "U":
        return {
            "name": name,
            "datatype": "BYTES",
            "shape": list(array.shape),
            "data": [text.encode() for text in array.ravel().tolist()],
        }
    return {
        "name": name,
        "datatype": _DATATYPES[array.dtype.str.lstrip("<|=")],
        "shape": list(array.shape),
        "data": array,
    }


def _as_array(value: Any) -> Any:
    """Return numbers or lists of text as an array; None for other values."""
    import numpy as np

    if isinstance(value, str | bytes | bytearray | dict) or value is None:
        return None
    if not isinstance(value, np.ndarray):
        if (torch := sys.modules.get("torch")) is not None and isinstance(value, torch.Tensor):
            value = value.detach().cpu()
            value = (value.float() if value.dtype == torch.bfloat16 else value).numpy()
        elif isinstance(value, list | tuple | bool | int | float | np.generic):
            try:
                value = np.asarray(value)
            except (ValueError, OverflowError):
                return None
    is_supported = isinstance(value, np.ndarray) and (
        value.dtype.kind == "U" or value.dtype.str.lstrip("<|=") in _DATATYPES
    )
    return value if is_supported else None


def _write_output(output: JsonObject, binary: bool, raw: list[bytes]) -> JsonObject:
    """Return the output's entry in the JSON; with `binary`, add its data to `raw`."""
    data, datatype = output["data"], output["datatype"]
    fields = {name: value for name, value in output.items() if name != "data"}
    if binary:
        raw.append(_encode_data(datatype, data))
        fields["parameters"] = {**(fields.get("parameters") or {}), SIZE_PARAMETER: len(raw[-1])}
        return fields
    if datatype != "BYTES":
        return {**fields, "data": data.ravel().tolist()}
    try:
        return {**fields, "data": [value.decode() for value in data]}
    except UnicodeDecodeError as error:
        raise PredictionFailed(
            f"The output {output['name']!r} is not text, so JSON cannot carry it: ask for it with"
            " binary_data."
        ) from error


def _encode_data(datatype: str, data: Any) -> bytes:
    if datatype == "BYTES":
        return b"".join(
            [part for value in data for part in (ELEMENT_LENGTH.pack(len(value)), value)]
        )
    if datatype == "BF16":
        return bytes((data.view("<u4") >> 16).astype("<u2").tobytes())
    return bytes(data.astype(DTYPES[datatype], copy=False).tobytes())


def parse_output_request(request: JsonObject) -> OutputRequest:
    """Read the outputs that a request asks for.

    Raises:
        BadRequest: The parameters or outputs have another form.
    """
    try:
        parameters = request.get("parameters") or {}
        binary = parameters.get("binary_data_output") is True
        outputs = [
            (
                str(output["name"]),
                (output.get("parameters") or {}).get("binary_data", binary) is True,
            )
            for output in request.get("outputs") or []
        ]
    except (AttributeError, KeyError, TypeError) as error:
        raise BadRequest(
            f"The request's parameters or outputs cannot be read: {type(error).__name__}: {error}."
        ) from error
    id = request.get("id")
    return OutputRequest(id if isinstance(id, str) else None, outputs, binary, parameters)


def _is_array(value: Any) -> bool:
    np, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    return (np is not None and isinstance(value, np.ndarray)) or (
        torch is not None and isinstance(value, torch.Tensor)
    )


def _iterate_values(data: Any) -> Iterable[Any]:
    if isinstance(data, list | tuple):
        for value in data:
            yield from _iterate_values(value)
    else:
        yield data


def _write_json(value: Any, nan: str) -> bytes:
    try:
        return to_compact_json(value, nan).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise PredictionFailed(
            f"The handler returned a value that is neither a tensor nor JSON: {error}"
        ) from error


def _list_like_class() -> type[np.ndarray[Any, Any]]:
    # The class derives from a class of numpy, which most workers do not import.
    from tsx_runtime.worker.codecs.array_list import ListLike

    return ListLike
