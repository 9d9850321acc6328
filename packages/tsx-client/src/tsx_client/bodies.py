"""The bodies of requests from Python's values, and Python's values from answers.

bytes, a Path, an open file, a PIL image   the body itself
str                                        text; of a model that takes images or files, a path
arrays of numpy, tensors of torch          tensors of the Open Inference Protocol, as bytes
several values, one of which is a file     a form
anything else                              JSON
"""

from __future__ import annotations

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

FileInput: TypeAlias = "bytes | str | os.PathLike[str] | IO[bytes] | Any"  # Any: an image of PIL
HEAD_LENGTH = (  # of the protocol: bytes of JSON before those of the tensors
    "inference-header-content-length"
)
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
    """What a server says that a model takes."""

    kind: str | None = None  # of the body: image, text, json, file
    tensors: Mapping[str, tuple[str, list[int]]] = {}  # datatype and shape by name

    @classmethod
    def of(cls, metadata: Mapping[str, Any]) -> Signature:
        inputs = metadata.get("inputs", ())
        tensors = {
            str(spec["name"]): (str(spec["datatype"]), list(spec["shape"])) for spec in inputs
        }
        kind = (metadata.get("parameters") or {}).get("input")
        return cls(None if kind is None else str(kind), tensors)

    @property
    def names(self) -> list[str]:
        """Of the arguments that `predict` takes; empty where that is not known."""
        return list(self.tensors) or (
            [] if self.kind is None else ["data" if self.kind == "json" else self.kind]
        )


class Content(NamedTuple):
    body: bytes = b""
    headers: Mapping[str, str] = {}
    infers: bool = False  # tensors, for the path of the Open Inference Protocol
    files: Mapping[str, tuple[str | None, bytes, str]] | None = (
        None  # the fields of a form, in place of `body`, as httpx takes them
    )

    @classmethod
    def of(cls, body: bytes, kind: str) -> Content:
        return cls(body, {"content-type": kind})


def encode(signature: Signature, payload: Any, inputs: Mapping[str, Any]) -> Content:
    """Raises TypeError for what the model does not take."""
    if payload is not None and inputs:
        raise TypeError(f"Give one value, or values by name ({', '.join(inputs)}), and not both.")
    takes_objects = not signature.tensors and signature.kind in (
        None,
        "json",
        "chat",
    )  # of any names
    if not takes_objects and not set(inputs) <= set(signature.names):
        raise TypeError(
            f"The model takes {', '.join(signature.names)}, and was given {', '.join(inputs)}."
        )
    named = inputs or ({} if payload is None else {next(iter(signature.tensors), "input"): payload})
    if (inputs and signature.tensors) or any(
        hasattr(value, "__array__") and not hasattr(value, "save") for value in named.values()
    ):
        return _tensors(named, signature)
    if not inputs or set(inputs) == set(signature.names):
        return _single(
            payload if payload is not None else next(iter(inputs.values()), None), signature.kind
        )
    if any(_is_file(value) for value in inputs.values()):
        return Content(files={name: _field(name, value) for name, value in inputs.items()})
    return Content.of(json.dumps(inputs).encode(), "application/json")


def decode(headers: Mapping[str, str], body: bytes) -> Any:
    """JSON as values, text as str, tensors by name, anything else as bytes.

    What names no type is JSON where it is written so.
    """
    kind = headers.get("content-type", "").partition(";")[0]
    with reading(f"The answer of {len(body)} bytes, of type {kind or 'unknown'},"):
        if HEAD_LENGTH in headers:
            length = int(headers[HEAD_LENGTH])
            return _outputs(json.loads(body[:length]), body[length:])
        if kind == "application/json":
            return json.loads(body)
        if not kind and body[:1] in (b"{", b"["):
            with suppress(ValueError, RecursionError):
                return json.loads(body)
        return body.decode() if kind.startswith("text/") else body


def _single(value: Any, kind: str | None) -> Content:
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


def _is_file(value: Any) -> bool:
    return (
        isinstance(value, bytes | bytearray | memoryview | os.PathLike)
        or hasattr(value, "read")
        or hasattr(value, "save")
    )


def _read(value: Any) -> tuple[str, bytes]:
    """Name and content."""
    if isinstance(value, bytes | bytearray | memoryview):
        return "", bytes(value)
    if isinstance(value, os.PathLike):
        return Path(value).name, Path(value).read_bytes()
    if hasattr(value, "read"):
        return str(getattr(value, "name", "")), value.read()
    written = io.BytesIO()
    value.save(written, "PNG")
    return "image.png", written.getvalue()


def _field(name: str, value: Any) -> tuple[str | None, bytes, str]:
    if _is_file(value):
        file, body = _read(value)
        return (
            Path(file).name or name,
            body,
            mimetypes.guess_type(file)[0] or "application/octet-stream",
        )
    return None, (value if isinstance(value, str) else json.dumps(value)).encode(), _TEXT


def _tensors(inputs: Mapping[str, Any], signature: Signature) -> Content:
    entries, parts = [], []
    for name, value in inputs.items():
        wanted = signature.tensors.get(name, (None, []))[0]
        if hasattr(value, "__array__"):
            kind, shape, data = _as_bytes(value, wanted)
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
                {"name": name, "shape": _shape(value), "datatype": wanted or "FP32", "data": value}
            )
    head = json.dumps(
        {"inputs": entries, "parameters": {"binary_data_output": bool(parts)}}
    ).encode()
    if not parts:
        return Content(head, {"content-type": "application/json"}, infers=True)
    headers = {"content-type": "application/octet-stream", HEAD_LENGTH: str(len(head))}
    return Content(b"".join([head, *parts]), headers, infers=True)


def _as_bytes(value: Any, wanted: str | None) -> tuple[str, list[int], bytes]:
    np = extra("numpy", "tsx-client[numpy]")
    array = np.asarray(value)
    if wanted in DTYPES and np.can_cast(array.dtype, DTYPES[wanted], "same_kind"):
        array = array.astype(DTYPES[wanted], copy=False)
    array = array.astype(array.dtype.newbyteorder("<"), copy=False)
    if array.dtype.str not in _DATATYPES:
        raise TypeError(
            f"Arrays of {array.dtype} cannot be sent. Convert it to numbers, such as float32."
        )
    return _DATATYPES[array.dtype.str], list(array.shape), array.tobytes()


def _shape(value: Any) -> list[int]:
    return [len(value), *_shape(value[0])] if isinstance(value, list | tuple) and value else []


def _outputs(answer: Mapping[str, Any], raw: bytes) -> dict[str, Any]:
    np = extra("numpy", "tsx-client[numpy]")
    found: dict[str, Any] = {}
    for each in answer["outputs"]:
        size, dtype, data = (
            (each.get("parameters") or {}).get("binary_data_size"),
            DTYPES.get(each["datatype"]),
            each.get("data"),
        )
        if size is not None:
            data, raw = raw[:size], raw[size:]
            data = (
                _texts(data, prod(each["shape"])) if dtype is None else np.frombuffer(data, dtype)
            )
        found[each["name"]] = (
            data if dtype is None else np.asarray(data, dtype).reshape(each["shape"])
        )
    return found


def _texts(data: bytes, count: int) -> list[bytes]:
    """The elements of a BYTES tensor, each behind its length."""
    found = []
    for _ in range(count):
        (size,) = struct.unpack_from("<I", data)
        found.append(data[4 : 4 + size])
        data = data[4 + size :]
    return found
