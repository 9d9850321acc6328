"""The types of a Python file, as types that pydantic can read and write.

pydantic does not know arrays, tensors, images and data frames. `adapt` annotates each of them with
a `Codec`, also inside other types, such as `dict[str, numpy.ndarray]`. The libraries are not
imported here: if a file uses a type, it has imported its library.
"""

from __future__ import annotations

import base64
import binascii
import io
import json
import sys
import types
import typing
from collections.abc import Callable, Collection, Mapping
from functools import partial, reduce
from operator import or_
from typing import Annotated, Any, NamedTuple

from pydantic_core import core_schema
from typing_extensions import NotRequired, Required, TypedDict, is_typeddict

from tsx_runtime.worker.codecs.json_text import EncodedBody
from tsx_runtime.worker.codecs.tables import UPLOAD_TYPES, frame_of, read_document, records_of
from tsx_runtime.worker.codecs.v2_binary import check_empty_shape

JSON = "application/json"
BINARY: dict[str, Any] = {"type": "string", "contentEncoding": "base64"}
NUMBERS: dict[str, Any] = {
    "type": ["array", "number"],
    "description": "numbers, or nested lists of numbers",
    "examples": [[0.0, 0.0]],
}


class Codec(NamedTuple):
    """The conversion of a type that pydantic does not know.

    Attributes:
        read: Returns a value of the type for a JSON value, the bytes of an upload, or such a value.
            It raises ValueError for others.
        write: Converts a value to JSON.
        schema: The JSON schema.
        upload_types: The content types of uploads.
        encode: Encodes a value as a whole response; None if it is sent as JSON.
    """

    read: Callable[[Any], Any]
    write: Callable[[Any], Any]
    schema: dict[str, Any]
    upload_types: tuple[str, ...]
    encode: Callable[[Any], EncodedBody] | None = None

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> core_schema.CoreSchema:
        serializer = core_schema.plain_serializer_function_ser_schema(self.write, when_used="json")
        return core_schema.no_info_plain_validator_function(self.read, serialization=serializer)

    def __get_pydantic_json_schema__(self, schema: Any, handler: Any) -> dict[str, Any]:
        return dict(self.schema)


def adapt(annotation: Any) -> Any:
    """Return the annotation, in which types that pydantic does not know have a `Codec`."""
    if (codec := codec_of(annotation)) is not None:
        return Annotated[annotation, codec]
    if is_typeddict(annotation):
        required = annotation.__required_keys__
        hints = typing.get_type_hints(annotation, include_extras=True)
        kind = typed_dict(annotation.__name__, hints, hints.keys() - required)
        kind.__pydantic_config__ = getattr(annotation, "__pydantic_config__", {})
        return kind
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is None or not arguments or origin is typing.Literal:
        return annotation
    if origin is Annotated:
        annotated: Any = Annotated
        parts = (adapt(arguments[0]), *arguments[1:])
        return annotated[parts]
    adapted = tuple(map(adapt, arguments))
    if origin in (Required, NotRequired):
        return adapted[0]
    if adapted == arguments:
        return annotation
    if origin in (typing.Union, types.UnionType):
        return reduce(or_, adapted)
    return origin[adapted]


def typed_dict(name: str, fields: Mapping[str, Any], optional: Collection[str]) -> Any:
    """Return a TypedDict that pydantic accepts in all versions of Python."""
    make_type: Any = TypedDict  # The fields are not known to the type checker.
    kinds = {field: adapt(kind) for field, kind in fields.items()}
    return make_type(name, kinds | {field: NotRequired[kinds[field]] for field in optional})


def codec_of(annotation: Any) -> Codec | None:
    """Return the codec of a type, or None if pydantic knows the type."""
    if annotation is bytes:
        return _BYTES
    kind, module = typing.get_origin(annotation) or annotation, sys.modules.get
    if (numpy := module("numpy")) and kind is numpy.ndarray:
        read = partial(_read_array, dtype=_dtype(annotation))
        return Codec(read, _as_list, NUMBERS, ("application/x-npy",))
    if (torch := module("torch")) and kind is torch.Tensor:
        return Codec(_read_tensor, _as_list, NUMBERS, ("application/x-npy",))
    if (pillow := module("PIL.Image")) and kind is pillow.Image:
        return _IMAGE
    if (pandas := module("pandas")) and kind is pandas.DataFrame:
        return _FRAME
    return None


def _parse(value: Any) -> Any:
    """Parse bytes that are a list, an object or a string in JSON; return other values."""
    if not isinstance(value, bytes | bytearray) or value.lstrip()[:1] not in (b"[", b"{", b'"'):
        return value
    try:
        return json.loads(value)
    except RecursionError as error:
        raise ValueError("the JSON is nested too deeply") from error


def _read_bytes(value: Any) -> bytes:
    if isinstance(value, str):
        content = value.partition(",")[2] if value.startswith("data:") else value
        try:
            return base64.b64decode(content, validate=True)
        except binascii.Error as error:
            raise ValueError(f"the string is not base64: {error}") from error
    if isinstance(value, bytes | bytearray):
        return bytes(value)
    raise ValueError("give the bytes as a string in base64")


def _write_bytes(value: Any) -> str:
    return base64.b64encode(value).decode()


def _dtype(annotation: Any) -> Any:
    """Return the dtype of `numpy.typing.NDArray[dtype]`, or None."""
    arguments = typing.get_args(annotation)
    dtypes = typing.get_args(arguments[1]) if len(arguments) == 2 else ()
    return dtypes[0] if dtypes and isinstance(dtypes[0], type) else None


def _read_array(value: Any, dtype: Any = None) -> Any:
    import numpy as np  # Only files that use it need it.

    value = _parse(value)
    if isinstance(value, bytes | bytearray):
        if not value.startswith(b"\x93NUMPY"):
            raise ValueError("give JSON, or a file that numpy.save has written")
        try:
            value = np.load(io.BytesIO(value), allow_pickle=False)
        # For a malformed header, numpy raises nearly anything.
        except Exception as error:
            raise ValueError(f"the .npy file cannot be read: {error}") from error
        check_empty_shape(value.shape)
    try:
        array: Any = np.asarray(value, dtype).view(np.ndarray)
    except (TypeError, OverflowError) as error:
        raise ValueError(f"give numbers, or nested lists of numbers: {error}") from error
    if array.dtype.kind not in "biufc":
        raise ValueError("give numbers, or nested lists of numbers of equal lengths")
    return array


def _read_tensor(value: Any) -> Any:
    torch = sys.modules["torch"]
    if isinstance(value, torch.Tensor):
        return value
    value = _parse(value)
    try:
        if isinstance(value, list | int | float):
            return torch.tensor(value)
        array = _read_array(value)
        # The arrays of some requests are not writable.
        return torch.from_numpy(array if array.flags.writeable else array.copy())
    except (TypeError, RuntimeError, OverflowError) as error:
        raise ValueError(f"give numbers, or nested lists of numbers: {error}") from error


def _as_list(value: Any) -> Any:
    return value.tolist()


def _read_image(value: Any) -> Any:
    from PIL import Image, UnidentifiedImageError

    if isinstance(value, Image.Image):
        return value
    try:
        image = Image.open(io.BytesIO(_read_bytes(_parse(value))))
        if image.format == "EPS":
            raise ValueError("EPS is a program, which Ghostscript would run")
        image.load()
    except MemoryError:
        raise
    # Pillow's text for an unknown format names an object in memory.
    except UnidentifiedImageError as error:
        raise ValueError("the image cannot be read: it has no known format") from error
    # Pillow's decoders raise nearly anything.
    except Exception as error:
        raise ValueError(f"the image cannot be read: {error}") from error
    return image


def _encode_image(image: Any) -> EncodedBody:
    file = io.BytesIO()
    image.save(file, "PNG")
    return EncodedBody.of(file.getvalue(), "image/png")


def _read_frame(value: Any) -> Any:
    is_file = isinstance(value, bytes | bytearray)
    return frame_of(read_document(value, None) if is_file else value)


_BYTES = Codec(
    _read_bytes,
    _write_bytes,
    BINARY,
    ("application/octet-stream",),
    lambda value: EncodedBody.of(value, "application/octet-stream"),
)
_IMAGE = Codec(
    _read_image,
    lambda image: _write_bytes(_encode_image(image)),
    BINARY | {"contentMediaType": "image/png"},
    ("image/*",),
    _encode_image,
)
_FRAME = Codec(
    _read_frame,
    records_of,
    {"type": "array", "items": {"type": "object"}},
    UPLOAD_TYPES,
)
