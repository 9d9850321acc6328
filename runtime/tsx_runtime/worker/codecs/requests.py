"""The conversion of a request into the handler's input: a row of named inputs.

A body becomes one input called `body`. Each field of a form, and each pair of the query string,
becomes an input with its name. See docs/reference/torchserve.md.
"""

from __future__ import annotations

import json
import logging
import re
import struct
from collections import defaultdict
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple, TypeAlias
from urllib.parse import parse_qsl

from python_multipart.multipart import parse_options_header

from tsx_runtime.errors import BadRequest, PredictionFailed
from tsx_runtime.wire import INPUTS, TENSORS_HEAD, Buffer
from tsx_runtime.worker.codecs import v2_binary
from tsx_runtime.worker.codecs.file_content import FileContent
from tsx_runtime.worker.exceptions import InvalidInput

logger = logging.getLogger("tsx.worker")

MAX_FORM_PARTS = 10_000
# The mark of a body of tensors, in place of its content type. The length of the JSON follows. It
# cannot be confused with a content type, since headers contain no line end.
TENSORS = "\n"

# The beginning of a JSON object, list or text, or a whole body that is a number or a literal.
_JSON_PATTERN = re.compile(rb'\s*(?:[{\["]|(?:[-+.\deE]+|true|false|null)\s*\Z)')
_BLANK_LINE = re.compile(rb"\r\n\r\n")
FORM_TYPE = "application/x-www-form-urlencoded"
_NO_TYPE_ADVICE = (
    "The request had no content type: send -H 'Content-Type: application/json' if the body is JSON."
)
_INPUT_LENGTHS = struct.Struct("<IQ")
_INPUTS_TYPE = INPUTS.decode()
_TENSORS_HEADER = f"\r\n{TENSORS_HEAD.decode()}: "


class FormPart(NamedTuple):
    """One field of a form."""

    name: str
    content_type: str | None
    value: bytearray


# The inputs, and for each field of a form its content type and repeated values. A handler finds
# these in the header dict under the field's name.
Row: TypeAlias = tuple[dict[str, Any], dict[str, dict[str, Any]] | None]


def read_row(meta: str, body: Buffer, decode: bool) -> Row:
    """Read a request as a row.

    Args:
        meta: The request's meta as in `wire.request_meta`.
        body: The request's body.
        decode: Whether JSON and text become Python values.

    Raises:
        BadRequest: A form cannot be read.
    """
    query, content_type = _query_and_type(meta[meta.find("\r\n") + 2 :])
    if content_type is None and not query:
        return {"body": owned_bytes(body)}, None
    return _read_typed(query, content_type or "", body, decode)


@lru_cache(maxsize=1024)  # Clients send the same headers again and again.
def _query_and_type(meta_tail: str) -> tuple[str, str | None]:
    """Return the query string and the content type, if any, from a meta without its request id."""
    query, _, headers = meta_tail.partition("\r\n")
    lower = f"\r\n{headers}".lower()
    # A request with this header needs no content type: Triton's clients send none.
    if (position := lower.find(_TENSORS_HEADER)) >= 0:
        start = position - 2 + len(_TENSORS_HEADER)
        return query, TENSORS + headers[start : headers.find("\r\n", start)]
    position = lower.find("\r\ncontent-type: ")
    if position < 0:
        return query, None
    return query, headers[position + 14 : headers.find("\r\n", position + 14)]


def _read_typed(query: str, content_type: str, body: Buffer, decode: bool) -> Row:
    inputs: dict[str, Any] = {}
    parts: dict[str, dict[str, Any]] = {}
    if query:
        # Headers travel as latin-1; a URL is UTF-8. Values are bytes, as in TorchServe.
        pairs = parse_qsl(
            query.encode("latin-1").decode("utf-8", "replace"), keep_blank_values=True
        )
        _add_fields(inputs, parts, [(name, bytearray(value, "utf-8")) for name, value in pairs])
    if content_type.startswith(TENSORS):
        request, output_request = v2_binary.read(
            content_type.removeprefix(TENSORS), owned_bytes(body)
        )
        inputs["body"] = request
        return inputs, output_request
    media_type = media_type_of(content_type)
    if media_type == "multipart/form-data":
        fields = read_multipart(content_type, body)
        parts |= {name: {"content-type": kind} for name, kind, _ in fields if kind is not None}
        _add_fields(
            inputs,
            parts,
            [
                (name, decode_body(kind, value) if kind and decode else value)
                for name, kind, value in fields
            ],
        )
    elif media_type == FORM_TYPE:
        if is_json(body):
            return _read_typed(query, "application/json", body, decode)
        # curl sends files of any kind with this type. Latin-1 keeps every byte of them, whereas
        # parse_qsl would decode bytes as ASCII.
        pairs = parse_qsl(str(body, "latin-1"), keep_blank_values=True, encoding="latin-1")
        _add_fields(
            inputs,
            parts,
            [
                (name.encode("latin-1").decode("utf-8", "replace"), bytearray(value, "latin-1"))
                for name, value in pairs
            ],
        )
    elif media_type == _INPUTS_TYPE:
        inputs.update(read_inputs(body))
    else:
        value = inputs["body"] = decode_body(content_type, body) if decode else owned_bytes(body)
        if type(value) is dict and "inputs" in value:
            return inputs, v2_binary.output_request_of_json(value) or parts
    return inputs, parts


def content_type_of(meta: str) -> str | None:
    """Return the media type of a request's body in lower case, or None if it has none."""
    content_type = _query_and_type(meta.partition("\r\n")[2])[1]
    return None if content_type is None else media_type_of(content_type)


def read_inputs(body: Buffer) -> dict[str, bytearray]:
    """Read the named inputs of a body of the type `wire.INPUTS`.

    Raises:
        BadRequest: The body has another form.
    """
    inputs, view, end = {}, memoryview(body), 0
    try:
        while end < len(view):
            name_length, value_length = _INPUT_LENGTHS.unpack_from(view, end)
            start = end + _INPUT_LENGTHS.size + name_length
            end = start + value_length
            if end > len(view):
                raise ValueError(f"it ends before {end}")
            inputs[str(view[start - name_length : start], "utf-8")] = bytearray(view[start:end])
    except (struct.error, ValueError) as error:
        raise BadRequest(
            f"The body is not of the type {_INPUTS_TYPE}, as its content type says: {error}."
        ) from error
    return inputs


def _add_fields(
    inputs: dict[str, Any], parts: dict[str, dict[str, Any]], fields: list[tuple[str, Any]]
) -> None:
    """Add the last value of each name, as TorchServe does.

    All values of a repeated name go to `parts`.
    """
    values_by_name: defaultdict[str, list[Any]] = defaultdict(list)
    for name, value in fields:
        values_by_name[name].append(value)
    for name, values in values_by_name.items():
        inputs[name] = values[-1]
        if len(values) > 1:
            parts.setdefault(name, {})["values"] = values


def decode_body(content_type: str, body: Buffer) -> Any:
    """Return JSON and text as Python values.

    Bodies of other types, and bodies that do not match their content type, stay bytes.
    """
    media_type = media_type_of(content_type)
    if media_type == "application/json":
        try:
            return json.loads(str(body, "utf-8-sig"))
        except (ValueError, RecursionError) as error:
            logger.warning(
                "a body with a JSON content type is not JSON, so the handler gets it as bytes: %s",
                error,
            )
    elif media_type.startswith("text/"):
        try:
            return str(body, _charset(content_type))
        except (ValueError, LookupError) as error:
            logger.warning(
                "a body of type %r cannot be decoded, so the handler gets it as bytes: %s",
                content_type,
                error,
            )
    return owned_bytes(body)


def is_json(body: Buffer) -> bool:
    """Tell whether a body is JSON, even invalid JSON, rather than the fields of a form.

    `curl -d` sends both with the content type of a form.
    """
    if not _JSON_PATTERN.match(body):
        return False
    text = bytes(body)
    if b"=" not in text:
        return True
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def json_fault(meta: str, body: Buffer, text: str) -> InvalidInput | PredictionFailed | None:
    """Return the client's error if the body is not valid JSON, or had no content type.

    Args:
        meta: The request's meta as in `wire.request_meta`.
        body: The body of a request for which the handler has failed.
        text: The text of the handler's error.
    """
    content_type = _query_and_type(meta.partition("\r\n")[2])[1]
    if content_type is None:
        return PredictionFailed(f"{text.rstrip('.')}. {_NO_TYPE_ADVICE}") if is_json(body) else None
    media_type = media_type_of(content_type)
    if media_type == "application/json" or (media_type == FORM_TYPE and is_json(body)):
        try:
            json.loads(str(body, "utf-8-sig"))
        except (ValueError, RecursionError) as error:
            return InvalidInput(f"The body is not valid JSON: {error}. {text}")
    return None


def owned_bytes(body: Buffer) -> bytearray:
    """Return memory that the handler may keep and change.

    It is a copy, unless the body already has its own memory.
    """
    return body if isinstance(body, bytearray) else bytearray(body)


def media_type_of(content_type: str) -> str:
    return content_type.partition(";")[0].strip().lower()


def _charset(content_type: str) -> str:
    if "charset" not in content_type.lower():
        return "utf-8"
    charset = parse_options_header(content_type)[1].get(b"charset", b"")
    return charset.decode("latin-1") or "utf-8"


def read_multipart(content_type: str, body: Buffer) -> list[FormPart]:
    """Read the parts of a form between its boundaries.

    Each boundary is a line of its own. Bytes before the first one are ignored (RFC 2046, section
    5.1.1).

    Raises:
        BadRequest: The form cannot be read.
    """
    boundary = parse_options_header(content_type)[1].get(b"boundary")
    if not boundary:
        raise BadRequest(
            "The multipart/form-data request has no boundary in its Content-Type header."
        )
    view = memoryview(body)
    boundaries = [
        match
        for match in re.finditer(rb"--" + re.escape(boundary) + rb"(--|(?=[ \t]*\r\n))", view)
        if not match.start() or bytes(view[match.start() - 2 : match.start()]) == b"\r\n"
    ]
    # If the first boundary is a last one and follows other bytes, the body is refused: these bytes
    # are more likely parts with another boundary.
    if not boundaries or (boundaries[0][1] and boundaries[0].start()):
        raise BadRequest(
            "The multipart/form-data body cannot be read: the boundary that its Content-Type header"
            " names is not in it."
        )
    last_boundaries = [index for index, match in enumerate(boundaries) if match[1]]
    if not last_boundaries:
        raise BadRequest(
            "The multipart/form-data body is incomplete: its last boundary is missing."
        )
    if last_boundaries[0] > MAX_FORM_PARTS:
        raise BadRequest(f"The multipart/form-data body has more than {MAX_FORM_PARTS} parts.")
    return [
        _read_part(view[match.end() : next_match.start() - 2])
        for match, next_match in pairwise(boundaries[: last_boundaries[0] + 1])
    ]


def _read_part(part: memoryview) -> FormPart:
    blank_line = _BLANK_LINE.search(part)
    headers: dict[bytes, bytes] = {}
    for header in bytes(part[: blank_line.start()] if blank_line else b"").split(b"\r\n"):
        header_name, _, header_value = header.partition(b":")
        headers[header_name.strip().lower()] = header_value.strip()
    _, options = parse_options_header(headers.get(b"content-disposition", b""))
    name = options.get(b"name")
    if blank_line is None or name is None:
        raise BadRequest(
            "A part of the multipart/form-data body has no name in its Content-Disposition header."
        )
    content_type = headers.get(b"content-type")
    if content_type is None and b"filename" in options:
        content_type = b"application/octet-stream"
    media_type = None if content_type is None else content_type.decode("latin-1")
    content = part[blank_line.end() :]
    value = bytearray(content)
    if b"filename" in options:
        value = file = FileContent(content)
        file.file_name = options[b"filename"].decode("utf-8", "replace")
    return FormPart(name.decode("utf-8", "replace"), media_type, value)
