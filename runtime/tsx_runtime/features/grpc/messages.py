"""The parsing of protobuf messages within limits, and the conversion of metadata to headers."""

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
# Prefixes of metadata that is not passed to handlers, because it describes the call's framing.
_RESERVED = ("grpc-", "content-type", TENSORS_HEAD.decode())
_FRAMING = (b"grpc-", b"content-", TENSORS_HEAD)
_PRINTABLE = "".join(chr(code) for code in range(0x20, 0x7F))
_VARINT, _LENGTH = 0, 2  # wire types
_FIXED_SIZES = {1: 8, 5: 4}  # sizes of the other wire types' values
GZIP = b"\x1f\x8b"  # No protobuf message begins with these bytes, because there is no wire type 7.
# Limit of one message's fields: tensors, map entries, strings. Packed numbers are one field.
MAX_FIELDS = 20_000
SMALL_MESSAGE_BYTES = 64 << 10  # limit of messages that carry no data for a model


async def read_message(kind: Any, raw: bytes, max_size: int) -> Any:
    """Parse a message.

    Args:
        kind: The class of the message.
        raw: The bytes of the message, which may be compressed.
        max_size: The largest size of the decompressed message.

    Raises:
        BadRequest: The bytes cannot be parsed, or have too many fields.
        PayloadTooLarge: The message is larger than `max_size`.
    """
    # A thread helps, because zlib releases the GIL.
    data = await asyncio.to_thread(decompress, raw, max_size) if raw.startswith(GZIP) else raw
    if len(data) > max_size:
        raise _too_large(max_size)
    if len(data) > 2 * MAX_FIELDS:  # The shortest field has two bytes.
        check_fields(kind.DESCRIPTOR, data)
    try:
        return kind.FromString(data)
    except DecodeError as error:
        name = kind.DESCRIPTOR.name
        raise BadRequest(
            f"The message of {len(data)} bytes is not a {name}: protobuf cannot parse it. Compare"
            " the .proto files."
        ) from error


def decompress(raw: bytes, max_size: int) -> bytes:
    """Decompress gzip up to a size; gRPC's core would have no limit.

    Raises:
        BadRequest: The data is not complete gzip data.
        PayloadTooLarge: The result is larger than `max_size`.
    """
    unpacker = zlib.decompressobj(wbits=zlib.MAX_WBITS | 16)
    try:
        data = unpacker.decompress(raw, max_size + 1)
    except zlib.error as error:
        raise BadRequest(
            f"The message is marked as gzip, but cannot be unpacked: {error}."
        ) from error
    if len(data) > max_size:
        raise _too_large(max_size)
    if not unpacker.eof:
        raise BadRequest("The message is marked as gzip, but its end is missing.")
    return data


def check_fields(kind: Descriptor, data: bytes) -> None:
    """Count the fields before parsing, because a field of 2 bytes may need 100 bytes of memory.

    Raises:
        BadRequest: There are too many fields.
    """
    remaining_fields, spans = MAX_FIELDS, [(kind, 0, len(data))]
    while spans:
        kind, at, end = spans.pop()
        nested = kind.fields_by_number
        while at < end:
            remaining_fields -= 1
            if remaining_fields < 0:
                raise BadRequest(
                    f"The message has more than {MAX_FIELDS} fields. Send numbers and strings as"
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
                # After the start of a group, its fields follow.
                at += _FIXED_SIZES.get(wire_type, 0)


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Return a number and its end; for truncated data 0, because protobuf rejects it later."""
    value = shift = 0
    for byte in data[at : at + 10]:
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
        shift += 7
    return 0, len(data)


def _too_large(max_size: int) -> PayloadTooLarge:
    return PayloadTooLarge(
        f"The message has more than {max_size} bytes, which is the limit of this method"
        " (max_request_size)."
    )


def metadata_to_headers(metadata: Iterable[tuple[str, str | bytes]]) -> list[Pair]:
    """Return a client's metadata as headers, without names and values that HTTP forbids.

    Binary values become base64.
    """
    pairs = []
    for key, value in metadata:
        if not key.startswith(_RESERVED):
            text = (
                base64.b64encode(value)
                if isinstance(value, bytes)
                else value.encode("latin-1", "replace")
            )
            pairs.append((key.encode(), text))
    return [pair for pair in pairs if is_header(*pair)]


def block_to_metadata(block: bytes) -> Metadata:
    """Return a handler's header block as metadata, without names that gRPC forbids.

    Raises:
        PredictionFailed: HTTP forbids one of the headers.
    """
    if not block:
        return ()
    pairs = (pair for pair in handler_headers(block) if pair not in NO_CACHE)
    return tuple(
        (name.decode(), _header_text(value))
        for name, value in pairs
        if _KEY.fullmatch(name) and not name.startswith(_FRAMING)
    )


def _header_text(value: bytes) -> str:
    text = value.decode("latin-1")
    return text if text.isascii() and text.isprintable() else quote(text, safe=_PRINTABLE)
