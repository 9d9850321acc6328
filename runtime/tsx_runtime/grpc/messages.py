"""From the bytes of a message to the message, refused where it is too large or is none; and a
call's metadata as headers, and back.
"""

from __future__ import annotations

import asyncio
import base64
import re
import zlib
from collections.abc import Iterable
from typing import Any
from urllib.parse import quote

from google.protobuf.descriptor import Descriptor
from google.protobuf.message import DecodeError

from tsx_runtime.api.headers import NO_CACHE, Pair, handler_headers, is_header
from tsx_runtime.errors import BadRequest, PayloadTooLarge
from tsx_runtime.wire import TENSORS_HEAD

Metadata = tuple[tuple[str, str], ...]

_KEY = re.compile(rb"[0-9a-z_.-]+")
_OURS = (
    "grpc-",
    "content-type",
    TENSORS_HEAD.decode(),
)  # what frames the call, or its body on the way to the worker
_FRAMING = (b"grpc-", b"content-", TENSORS_HEAD)
_PRINTABLE = "".join(chr(code) for code in range(0x20, 0x7F))
_VARINT, _LENGTH = 0, 2  # wire types
_FIXED = {1: 8, 5: 4}  # bytes of those that have always the same
GZIP = b"\x1f\x8b"  # no message begins so: wire type 7 does not exist in protobuf
# of one message: tensors, entries of maps, strings; packed numbers are one field, however many
# there are
MOST_FIELDS = 20_000
SMALL = 64 << 10  # bytes of a message that carries no data for a model


async def read_message(kind: Any, raw: bytes, most: int) -> Any:
    """A message of the class `kind`, of at most so many bytes.

    Raises BadRequest and PayloadTooLarge.
    """
    data = (
        await asyncio.to_thread(unpacked, raw, most) if raw.startswith(GZIP) else raw
    )  # zlib leaves the event loop its turn
    if len(data) > most:
        raise _too_large(most)
    if len(data) > 2 * MOST_FIELDS:  # the shortest field has two bytes
        check_fields(kind.DESCRIPTOR, data)
    try:
        return kind.FromString(data)
    except DecodeError as error:
        name = kind.DESCRIPTOR.name
        raise BadRequest(
            f"The message of {len(data)} bytes is not a {name}: protobuf cannot parse it. Compare"
            " the .proto files."
        ) from error


def unpacked(raw: bytes, most: int) -> bytes:
    """Unpack gzip, but no more bytes than are allowed: gRPC's own core would unpack all of them."""
    unpacker = zlib.decompressobj(wbits=zlib.MAX_WBITS | 16)
    try:
        data = unpacker.decompress(raw, most + 1)
    except zlib.error as error:
        raise BadRequest(
            f"The message is marked as gzip, but cannot be unpacked: {error}."
        ) from error
    if len(data) > most:
        raise _too_large(most)
    if not unpacker.eof:
        raise BadRequest("The message is marked as gzip, but its end is missing.")
    return data


def check_fields(kind: Descriptor, data: bytes) -> None:
    """Count before anything is parsed: two bytes of a message become a hundred of memory.

    Raises BadRequest.
    """
    left, spans = MOST_FIELDS, [(kind, 0, len(data))]
    while spans:
        kind, at, end = spans.pop()
        nested = kind.fields_by_number
        while at < end:
            left -= 1
            if left < 0:
                raise BadRequest(
                    f"The message has more than {MOST_FIELDS} fields. Send numbers and strings as"
                    " raw_input_contents."
                )
            tag, at = _varint(data, at)
            wire_type = tag & 7
            if wire_type == _LENGTH:
                size, at = _varint(data, at)
                field = nested.get(tag >> 3)
                if field is not None and field.message_type is not None:
                    spans.append((field.message_type, at, min(at + size, end)))
                at += size
            elif wire_type == _VARINT:
                _, at = _varint(data, at)
            else:
                at += _FIXED.get(wire_type, 0)  # of a group, its fields follow


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """The number, and where it ends; 0 where the data do, which protobuf will complain of."""
    value = shift = 0
    for byte in data[at : at + 10]:
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
        shift += 7
    return 0, len(data)


def _too_large(most: int) -> PayloadTooLarge:
    return PayloadTooLarge(
        f"The message has more than {most} bytes, which is the limit of this method"
        " (max_request_size)."
    )


def as_headers(metadata: Iterable[tuple[str, str | bytes]]) -> list[Pair]:
    """Return what the client sent beside its message, without what HTTP does not allow.

    Binary values become base64.
    """
    pairs = []
    for key, value in metadata:
        if not key.startswith(_OURS):
            text = (
                base64.b64encode(value)
                if isinstance(value, bytes)
                else value.encode("latin-1", "replace")
            )
            pairs.append((key.encode(), text))
    return [pair for pair in pairs if is_header(*pair)]


def from_block(block: bytes) -> Metadata:
    """A handler's header block.

    Raises `PredictionFailed` for what not even HTTP allows; a name that gRPC does not is left out.
    """
    if not block:
        return ()
    own = (pair for pair in handler_headers(block) if pair not in NO_CACHE)
    return tuple(
        (name.decode(), _value(value))
        for name, value in own
        if _KEY.fullmatch(name) and not name.startswith(_FRAMING)
    )


def _value(value: bytes) -> str:
    text = value.decode("latin-1")
    return text if text.isascii() and text.isprintable() else quote(text, safe=_PRINTABLE)
