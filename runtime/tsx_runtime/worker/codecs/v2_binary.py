"""Tensors of the Open Inference Protocol with its binary extension.

Requests become arrays, and results become responses. Such a body is JSON, followed by the bytes of
those tensors whose `binary_data_size` the JSON names; a header has the length of the JSON. gRPC's
ModelInfer comes in the same form.

A handler gets `body`: the JSON's dict, with an array in each `data`. Its result need not follow the
protocol: arrays, numbers, text and JSON all become tensors.
"""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Collection, Iterable, Mapping
from math import prod
from typing import TYPE_CHECKING, Any, TypeAlias

from tsx_runtime.errors import BadRequest, PredictionFailed
from tsx_runtime.wire import TENSORS_HEAD
from tsx_runtime.worker.codecs.json_text import NULL, RelayedRows, to_compact_json

if TYPE_CHECKING:
    import numpy as np

    from tsx_runtime.worker.handler_api.context import Context

JsonObject: TypeAlias = dict[str, Any]

SIZE = "binary_data_size"
OUTPUT = "output"  # the name of a result without names
MAX_LENGTH_DIGITS = 20  # Python's int refuses thousands.

LENGTH = struct.Struct("<I")  # precedes each element of BYTES
# BYTES, and BF16, which numpy does not have, are handled apart.
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

    It takes the place of the part headers of a form, which such a request does not have.

    Attributes:
        parameters: The parameters of the request.
        id: The id of the request.
        outputs: Names, and whether each one is wanted as bytes; an empty list means all outputs.
        binary: Whether outputs without such a setting come as bytes.
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
    """Return the output request of a request in JSON alone, if it asks for a response in bytes.

    Other requests are not checked further.
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


def read(length: str, body: bytearray) -> tuple[JsonObject, OutputRequest]:
    """Return the request, with its tensors as arrays in `data`, and its output request.

    Args:
        length: The number of bytes of JSON, from the header.
        body: The JSON and the bytes of the tensors.

    Raises:
        BadRequest: The request does not have this form.
    """
    if not (
        length.isdecimal() and len(length) <= MAX_LENGTH_DIGITS and 0 < int(length) <= len(body)
    ):
        raise BadRequest(
            f"The header {TENSORS_HEAD.decode()} is {length[:40]!r}: it takes the number of bytes"
            " of JSON that the body begins with."
        )
    try:
        request = json.loads(str(body[: int(length)], "utf-8"))
        inputs = request["inputs"]
        if not isinstance(inputs, list):
            raise TypeError(f"its inputs are {type(inputs).__name__}")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise BadRequest(
            f"The request does not begin with JSON that has a list of inputs: {error}."
        ) from error
    raw, at = memoryview(body)[int(length) :], 0
    for tensor in inputs:
        at = _read_input(tensor, raw, at)
    if at != len(raw):
        raise BadRequest(
            f"{len(raw)} bytes follow the JSON, but the {SIZE} of its inputs add up to {at}."
        )
    return Tensors(request), parse_output_request(request)


def _read_input(tensor: Any, raw: memoryview, at: int) -> int:
    """Put the bytes of a tensor, which begin at `at`, into its `data`; return where they end."""
    try:
        size = (tensor.get("parameters") or {}).get(SIZE)
        if size is None:
            return at
        end = at + int(size)
        if not at <= end <= len(raw):
            raise ValueError(f"its {end - at} bytes are missing")
        tensor["data"] = array_of(
            tensor["datatype"], [int(length) for length in tensor["shape"]], raw[at:end]
        )
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as error:
        name = tensor.get("name") if isinstance(tensor, dict) else tensor
        raise BadRequest(
            f"The input {name!r:.200} cannot be read: {type(error).__name__}: {error}."
        ) from error
    return end


def array_of(datatype: str, shape: list[int], raw: memoryview) -> Any:
    """Return an array in the memory of `raw`, or a list for BYTES.

    Raises:
        ValueError: The bytes do not fit the datatype and shape.
    """
    import numpy as np  # Most workers never see a tensor.

    if datatype == "BYTES":
        return read_bytes(raw, prod(shape))
    if datatype == "BF16":
        wide = np.frombuffer(raw, "<u2").astype("<u4")
        return (wide << 16).view("<f4").reshape(shape).view(_listlike())
    if datatype not in DTYPES:
        raise ValueError(
            f"there is no datatype {datatype!r}; there are {', '.join(DTYPES)}, BF16 and BYTES"
        )
    return np.frombuffer(raw, DTYPES[datatype]).reshape(shape).view(_listlike())


def read_bytes(raw: memoryview, count: int) -> list[bytes]:
    """Read the elements of BYTES.

    Raises:
        ValueError: Their lengths or their number are wrong.
    """
    values, at = [], 0
    while at < len(raw):
        (length,) = LENGTH.unpack_from(raw, at) if at + LENGTH.size <= len(raw) else (len(raw),)
        at += LENGTH.size + length
        if at > len(raw):
            raise ValueError("the lengths of its elements do not add up")
        values.append(bytes(raw[at - length : at]))
    if len(values) != count:
        raise ValueError(f"it has {len(values)} elements, and its shape {count}")
    return values


def as_row(inputs: JsonObject) -> JsonObject:
    """Return the row for a handler without an envelope.

    Each tensor has its name. The first one is also `body`, unless a name is one that handlers look
    for. BYTES of one element are that element, like the field of a form. A body that was JSON as a
    whole stays.
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
    begun: Collection[int],
) -> list[Any]:
    """Return the handler's results, wrapped if their requests had tensors.

    A response that streams already stays.
    """
    return [
        (
            TensorResponse(value, output_request, idx, context, version)
            if isinstance(output_request := output_requests.get(idx), OutputRequest)
            and idx not in begun
            and not isinstance(value, RelayedRows)
            else value
        )
        for idx, value in enumerate(results)
    ]


class TensorResponse:
    """A response that `encode` turns into tensors. If that fails, it fails alone."""

    def __init__(
        self,
        value: Any,
        output_request: OutputRequest,
        idx: int,
        context: Context,
        version: str,
    ) -> None:
        self._value = value
        self._output_request = output_request
        self._idx = idx
        self._context = context
        self._version = version

    def encode(self, nan: str = NULL) -> bytes:
        """Return the body, and set its headers in the context.

        Raises:
            PredictionFailed: The value cannot be written as the tensors that were asked for.
        """
        context, output_request = self._context, self._output_request
        # With an error status, the handler itself explains what is wrong.
        if context.get_response_status(self._idx)[0] >= 400:
            return self._value if isinstance(self._value, bytes) else str(self._value).encode()
        response = as_response(self._value, output_request, nan)
        head = {
            "model_name": context.model_name,
            "model_version": self._version,
            "id": output_request.id or "",
            **response,
        }
        if not head["id"]:
            del head["id"]
        binary = dict(output_request.outputs)
        raw: list[bytes] = []
        head["outputs"] = [
            _write_output(output, binary.get(output["name"], output_request.binary), raw)
            for output in response["outputs"]
        ]
        text = to_compact_json(head, nan).encode()
        if not raw:
            context.set_response_content_type(self._idx, "application/json")
            return text
        context.set_response_content_type(self._idx, "application/octet-stream")
        context.set_response_header(self._idx, "Inference-Header-Content-Length", str(len(text)))
        return b"".join([text, *raw])


def as_response(value: Any, output_request: OutputRequest, nan: str = NULL) -> JsonObject:
    """Return the protocol's response with the outputs that were asked for.

    Each `data` is an array, or a list of bytes for BYTES.
    """
    response = _own_response(value)
    outputs = (
        [_as_output(output) for output in response["outputs"]]
        if response
        else _outputs_of(value, output_request, nan)
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


def _own_response(value: Any) -> JsonObject | None:
    """Return the result of a handler or an envelope if it is a response already."""
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


def _as_output(output: JsonObject) -> JsonObject:
    """Return a tensor that a handler wrote itself, with its `data` as an array."""
    import numpy as np

    datatype, data = output["datatype"], output["data"]
    try:
        if datatype == "BYTES":
            values: Any = [
                value.encode() if isinstance(value, str) else bytes(value) for value in _flat(data)
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


def _outputs_of(value: Any, output_request: OutputRequest, nan: str) -> list[JsonObject]:
    """Return the outputs of any other value: one tensor, or one for each entry of a dict of arrays.

    A single tensor has the name that was asked for.
    """
    if isinstance(value, dict) and value and all(_is_array(entry) for entry in value.values()):
        return [_output(str(name), entry, nan) for name, entry in value.items()]
    return [
        _output(
            output_request.outputs[0][0] if len(output_request.outputs) == 1 else OUTPUT, value, nan
        )
    ]


def _output(name: str, value: Any, nan: str) -> JsonObject:
    array = _as_array(value)
    if array is None:
        text = (
            value
            if isinstance(value, bytes | bytearray)
            else value.encode()
            if isinstance(value, str)
            else _json(value, nan)
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
    """Return an array of numbers, or of text in lists; None for other values."""
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
    known = isinstance(value, np.ndarray) and (
        value.dtype.kind == "U" or value.dtype.str.lstrip("<|=") in _DATATYPES
    )
    return value if known else None


def _write_output(output: JsonObject, binary: bool, raw: list[bytes]) -> JsonObject:
    """Return the output for the JSON. If it comes as bytes, they are added to `raw`."""
    data, datatype = output["data"], output["datatype"]
    head = {name: value for name, value in output.items() if name != "data"}
    if binary:
        raw.append(_bytes_of(datatype, data))
        head["parameters"] = {**(head.get("parameters") or {}), SIZE: len(raw[-1])}
        return head
    if datatype != "BYTES":
        return {**head, "data": data.ravel().tolist()}
    try:
        return {**head, "data": [value.decode() for value in data]}
    except UnicodeDecodeError as error:
        raise PredictionFailed(
            f"The output {output['name']!r} is not text, so JSON cannot carry it: ask for it with"
            " binary_data."
        ) from error


def _bytes_of(datatype: str, data: Any) -> bytes:
    if datatype == "BYTES":
        return b"".join([part for value in data for part in (LENGTH.pack(len(value)), value)])
    if datatype == "BF16":
        return bytes((data.view("<u4") >> 16).astype("<u2").tobytes())
    return bytes(data.astype(DTYPES[datatype], copy=False).tobytes())


def parse_output_request(request: JsonObject) -> OutputRequest:
    """Read which outputs a request asks for.

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


def _flat(data: Any) -> Iterable[Any]:
    if isinstance(data, list | tuple):
        for value in data:
            yield from _flat(value)
    else:
        yield data


def _json(value: Any, nan: str) -> bytes:
    try:
        return to_compact_json(value, nan).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise PredictionFailed(
            f"The handler returned a value that is neither a tensor nor JSON: {error}"
        ) from error


def _listlike() -> type[np.ndarray[Any, Any]]:
    # A class cannot be made before its base is imported.
    from tsx_runtime.worker.codecs.array_list import ListLike

    return ListLike
