"""The conversion of Python's values to request bodies, and of responses to values.

bytes, a Path, an open file, a PIL image   the body itself
str                                        text, or a path if the model takes images or files
numpy arrays, torch tensors                binary tensors of the Open Inference Protocol
several values, one of them a file         a form; JSON with base64 if the model has a signature
all other values                           JSON
"""

from __future__ import annotations

import base64
import io
import json
import mimetypes
import os
import struct
from collections.abc import Mapping
from contextlib import suppress
from math import prod
from pathlib import Path
from typing import IO, Any, NamedTuple, TypeAlias

from tsx_client.errors import extra, reading

FileInput: TypeAlias = "bytes | str | os.PathLike[str] | IO[bytes] | Any"  # Any: a PIL image
# Header of the Open Inference Protocol: the bytes of JSON that precede binary tensors.
JSON_LENGTH_HEADER = "inference-header-content-length"
DTYPES = {"BOOL": "?", "FP16": "<f2", "FP32": "<f4", "FP64": "<f8"}
DTYPES |= {
    f"{sign}INT{8 * size}": f"<{sign.lower() or 'i'}{size}"
    for sign in ("", "U")
    for size in (1, 2, 4, 8)
}
_DATATYPES = {dtype: name for name, dtype in DTYPES.items()} | {
    "|b1": "BOOL",
    "|i1": "INT8",
    "|u1": "UINT8",
    "<b1": "BOOL",
}
_FILES = ("image", "file")
_TEXT = "text/plain; charset=utf-8"


class Signature(NamedTuple):
    """The inputs of a model, according to its server."""

    kind: str | None = None  # image, text, json or file
    tensors: Mapping[str, tuple[str, list[int]]] = {}  # name -> datatype and shape
    fields: Mapping[str, Any] = {}  # JSON schemas of the fields of its JSON object, by name

    @classmethod
    def of(cls, metadata: Mapping[str, Any]) -> Signature:
        """Read the inputs from the metadata of a model."""
        inputs = metadata.get("inputs", ())
        tensors = {
            str(spec["name"]): (str(spec["datatype"]), list(spec["shape"])) for spec in inputs
        }
        kind = (metadata.get("parameters") or {}).get("input")
        schema = (metadata.get("signature") or {}).get("input", {})
        fields = dict(resolve(schema, schema).get("properties", {}))
        return cls(None if kind is None else str(kind), tensors, fields)

    @property
    def names(self) -> list[str]:
        """Names of the arguments of `predict`; empty if they are unknown."""
        return list(self.tensors) or (
            [] if self.kind is None else ["data" if self.kind == "json" else self.kind]
        )


def resolve(schema: Mapping[str, Any], root: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the definition of `root` to which a JSON schema refers, or the schema itself."""
    reference = schema.get("$ref", "")
    definition: Mapping[str, Any] = (
        root["$defs"][reference.removeprefix("#/$defs/")] if reference else schema
    )
    return definition


class Content(NamedTuple):
    """The body of a request and its headers."""

    body: bytes = b""
    headers: Mapping[str, str] = {}
    is_tensors: bool = False  # whether the request needs the path of the Open Inference Protocol
    files: Mapping[str, tuple[str | None, bytes, str]] | None = None  # a form, in place of `body`

    @classmethod
    def of(cls, body: bytes, content_type: str) -> Content:
        """Return a body of one content type."""
        return cls(body, {"content-type": content_type})


def encode(signature: Signature, payload: Any, inputs: Mapping[str, Any]) -> Content:
    """Convert the arguments of `predict` to the body of a request.

    Raises:
        TypeError: The model does not take these arguments.
    """
    if payload is not None and inputs:
        raise TypeError(f"Give one value, or values by name ({', '.join(inputs)}), and not both.")
    are_arrays = [_is_array(value) for value in inputs.values()]
    if signature.fields and inputs and not all(are_arrays):
        return Content.of(json.dumps(inputs, default=_to_json).encode(), "application/json")
    takes_any_names = not signature.tensors and signature.kind in (None, "json", "chat")
    if not takes_any_names and not set(inputs) <= set(signature.names):
        raise TypeError(
            f"The model takes {', '.join(signature.names)}, and was given {', '.join(inputs)}."
        )
    named_inputs = inputs or (
        {} if payload is None else {next(iter(signature.tensors), "input"): payload}
    )
    if (inputs and signature.tensors) or any(map(_is_array, named_inputs.values())):
        return _encode_tensors(named_inputs, signature)
    if not inputs or set(inputs) == set(signature.names):
        return _encode_single(
            payload if payload is not None else next(iter(inputs.values()), None), signature.kind
        )
    if any(_is_file(value) for value in inputs.values()):
        return Content(files={name: _form_field(name, value) for name, value in inputs.items()})
    return Content.of(json.dumps(inputs).encode(), "application/json")


def decode(headers: Mapping[str, str], body: bytes) -> Any:
    """Convert a response: JSON to values, text to str, tensors to arrays by name, or else to bytes.

    A body without a content type is JSON if it begins like an object or an array.

    Raises:
        InvalidAnswer: The body contradicts the headers.
    """
    kind = headers.get("content-type", "").partition(";")[0]
    with reading(f"The answer of {len(body)} bytes, of type {kind or 'unknown'},"):
        if JSON_LENGTH_HEADER in headers:
            length = int(headers[JSON_LENGTH_HEADER])
            return _decode_outputs(json.loads(body[:length]), body[length:])
        if kind == "application/json":
            return json.loads(body)
        if not kind and body[:1] in (b"{", b"["):
            with suppress(ValueError, RecursionError):
                return json.loads(body)
        return body.decode() if kind.startswith("text/") else body


def _encode_single(value: Any, kind: str | None) -> Content:
    if value is None:
        return Content()
    if isinstance(value, str):
        if kind not in _FILES:
            return Content.of(value.encode(), _TEXT)
        value = Path(value)
    if not _is_file(value) or kind == "json":
        return Content.of(json.dumps(value).encode(), "application/json")
    name, body = _read(value)
    return Content.of(body, mimetypes.guess_type(name)[0] or "application/octet-stream")


def _is_array(value: Any) -> bool:
    return hasattr(value, "__array__") and not hasattr(value, "save")


def _to_json(value: Any) -> Any:
    """Return a file as base64, and an array as lists, for `json.dumps`."""
    if _is_file(value):
        return base64.b64encode(_read(value)[1]).decode()
    if _is_array(value):
        return value.tolist()
    raise TypeError(f"Values of {type(value).__name__} cannot be sent as JSON.")


def _is_file(value: Any) -> bool:
    return (
        isinstance(value, bytes | bytearray | memoryview | os.PathLike)
        or hasattr(value, "read")
        or hasattr(value, "save")
    )


def _read(value: Any) -> tuple[str, bytes]:
    """Return the name and the content of a file."""
    if isinstance(value, bytes | bytearray | memoryview):
        return "", bytes(value)
    if isinstance(value, os.PathLike):
        return Path(value).name, Path(value).read_bytes()
    if hasattr(value, "read"):
        return str(getattr(value, "name", "")), value.read()
    buffer = io.BytesIO()
    value.save(buffer, "PNG")
    return "image.png", buffer.getvalue()


def _form_field(name: str, value: Any) -> tuple[str | None, bytes, str]:
    if _is_file(value):
        file, body = _read(value)
        return (
            Path(file).name or name,
            body,
            mimetypes.guess_type(file)[0] or "application/octet-stream",
        )
    return None, (value if isinstance(value, str) else json.dumps(value)).encode(), _TEXT


def _encode_tensors(inputs: Mapping[str, Any], signature: Signature) -> Content:
    entries, parts = [], []
    for name, value in inputs.items():
        datatype = signature.tensors.get(name, (None, []))[0]
        if hasattr(value, "__array__"):
            kind, shape, data = _as_bytes(value, datatype)
            entries.append(
                {
                    "name": name,
                    "shape": shape,
                    "datatype": kind,
                    "parameters": {"binary_data_size": len(data)},
                }
            )
            parts.append(data)
        else:
            entries.append(
                {
                    "name": name,
                    "shape": _shape(value),
                    "datatype": datatype or "FP32",
                    "data": value,
                }
            )
    header = json.dumps(
        {"inputs": entries, "parameters": {"binary_data_output": bool(parts)}}
    ).encode()
    if not parts:
        return Content(header, {"content-type": "application/json"}, is_tensors=True)
    headers = {"content-type": "application/octet-stream", JSON_LENGTH_HEADER: str(len(header))}
    return Content(b"".join([header, *parts]), headers, is_tensors=True)


def _as_bytes(value: Any, datatype: str | None) -> tuple[str, list[int], bytes]:
    np = extra("numpy", "tsx-client[numpy]")
    array = np.asarray(value)
    if datatype in DTYPES and np.can_cast(array.dtype, DTYPES[datatype], "same_kind"):
        array = array.astype(DTYPES[datatype], copy=False)
    array = array.astype(array.dtype.newbyteorder("<"), copy=False)
    if array.dtype.str not in _DATATYPES:
        raise TypeError(
            f"Arrays of {array.dtype} cannot be sent. Convert it to numbers, such as float32."
        )
    return _DATATYPES[array.dtype.str], list(array.shape), array.tobytes()


def _shape(value: Any) -> list[int]:
    return [len(value), *_shape(value[0])] if isinstance(value, list | tuple) and value else []


def _decode_outputs(response: Mapping[str, Any], raw: bytes) -> dict[str, Any]:
    np = extra("numpy", "tsx-client[numpy]")
    arrays: dict[str, Any] = {}
    for output in response["outputs"]:
        size = (output.get("parameters") or {}).get("binary_data_size")
        dtype, data, shape = DTYPES.get(output["datatype"]), output.get("data"), output["shape"]
        if size is not None:
            data, raw = raw[:size], raw[size:]
            data = _split_texts(data, prod(shape)) if dtype is None else np.frombuffer(data, dtype)
        arrays[output["name"]] = data if dtype is None else np.asarray(data, dtype).reshape(shape)
    return arrays


def _split_texts(data: bytes, count: int) -> list[bytes]:
    """Split a BYTES tensor into its elements; the length of each element precedes it."""
    elements = []
    for _ in range(count):
        (size,) = struct.unpack_from("<I", data)
        elements.append(data[4 : 4 + size])
        data = data[4 + size :]
    return elements
