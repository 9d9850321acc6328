"""JSON reading for tokenizers, and JSON writing for the values of handlers.

Arrays of numpy and torch are written as lists. The setting `json_nan` decides how NaN is written.
"""

from __future__ import annotations

import json
import math
from typing import Any

from tsx_runtime.wire import JSON_HEADER

# The values of `json_nan`. With LITERAL, NaN is written as in Python and TorchServe, which is not
# valid JSON.
NULL, STRING, LITERAL = ("null", "string", "literal")

_PLAIN = frozenset({str, int, float, bool, type(None)})


class JsonText(str):
    """Text that is JSON, and is sent with the content type of JSON."""


class EncodedBody(bytes):
    """A whole response, which is JSON unless `of` has made it with another content type."""

    headers: bytes = JSON_HEADER

    @classmethod
    def of(cls, body: bytes, content_type: str) -> EncodedBody:
        """Return a response with a content type."""
        encoded = cls(body)
        encoded.headers = b"content-type: %b\r\n" % content_type.encode()
        return encoded


class RelayedRows(JsonText):
    """Rows for the next nodes of a workflow, in place of a response for a client."""


def read_json(text: bytes | str) -> Any:
    """Parse JSON.

    Raises:
        ValueError: The text is not JSON, or a string has half of a surrogate pair, which
            tokenizers do not accept.
    """
    try:
        document = json.loads(text)
        if "\\u" in text if isinstance(text, str) else b"\\u" in text:
            json.dumps(document, ensure_ascii=False).encode()
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    return document


def _numbers(value: Any) -> Any:
    """Return an array, a numpy scalar or a tensor as Python numbers for the encoder."""
    if not hasattr(value, "tolist"):
        raise TypeError(f"Object of type {type(value).__name__} is not JSON serializable")
    return value.tolist()


_encode_flat = json.JSONEncoder(separators=(",\n  ", ": "), allow_nan=False).encode
_encode_indented = json.JSONEncoder(indent=2, allow_nan=False, default=_numbers).encode
_encode_compact = json.JSONEncoder(allow_nan=False, default=_numbers).encode


def to_json(value: Any, nan: str = NULL) -> str:
    """Write JSON as `json.dumps(value, indent=2)` does, which is TorchServe's form.

    Most results are a list or dict of plain values, which takes a third of the time: Python's fast
    encoder cannot indent, but its separator may contain the line end and the indent.

    Raises:
        TypeError: A value cannot be written as JSON.
        ValueError: A value contains itself.
        RecursionError: A value is nested too deeply.
    """
    kind = type(value)
    try:
        if (
            (kind is list or kind is dict)
            and value
            and _PLAIN.issuperset(map(type, value.values() if kind is dict else value))
        ):
            text = _encode_flat(value)
            return f"{text[0]}\n  {text[1:-1]}\n{text[-1]}"
        return _encode_indented(value)
    except (TypeError, ValueError):  # The value has a numpy key, NaN or an infinity.
        return json.dumps(_make_writable(value, nan), indent=2)


def to_compact_json(value: Any, nan: str = NULL) -> str:
    """Write JSON on one line; it raises the same errors as `to_json`."""
    try:
        return _encode_compact(value)
    except (TypeError, ValueError):
        return json.dumps(_make_writable(value, nan))


def _make_writable(value: Any, nan: str) -> Any:
    if isinstance(value, float):
        return (
            value
            if nan == LITERAL or math.isfinite(value)
            else None
            if nan == NULL
            else json.dumps(float(value))
        )
    if isinstance(value, dict):
        return {
            _numbers(key) if hasattr(key, "tolist") else key: _make_writable(entry, nan)
            for key, entry in value.items()
        }
    if isinstance(value, list | tuple):
        return [_make_writable(entry, nan) for entry in value]
    return _make_writable(value.tolist(), nan) if hasattr(value, "tolist") else value
