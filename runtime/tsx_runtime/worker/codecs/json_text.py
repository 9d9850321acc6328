"""JSON: read for tokenizers, and written of a handler's value, with arrays of numpy and torch, and
NaN as the setting `json_nan` says.
"""

from __future__ import annotations

import json
import math
from typing import Any

NULL, STRING, LITERAL = (
    "null",
    "string",
    "literal",
)  # of `json_nan`; `literal` is what Python and TorchServe write, and no JSON

_PLAIN = frozenset({str, int, float, bool, type(None)})


class JsonText(str):
    """Text that is JSON: its answer says so."""


class RelayedRows(JsonText):
    """Rows for the next nodes of a workflow, in place of an answer for a client."""


def read_json(text: bytes | str) -> Any:
    """Raises ValueError; also where a string has half of a surrogate pair, which no tokenizer
    takes.
    """
    try:
        document = json.loads(text)
        if "\\u" in text if isinstance(text, str) else b"\\u" in text:
            json.dumps(document, ensure_ascii=False).encode()
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    return document


def _numbers(value: Any) -> Any:
    """What the encoder does not know: an array or a scalar of numpy, a tensor."""
    if not hasattr(value, "tolist"):
        raise TypeError(f"Object of type {type(value).__name__} is not JSON serializable")
    return value.tolist()


_flat = json.JSONEncoder(separators=(",\n  ", ": "), allow_nan=False).encode
_indented = json.JSONEncoder(indent=2, allow_nan=False, default=_numbers).encode
_compact = json.JSONEncoder(allow_nan=False, default=_numbers).encode


def to_json(value: Any, nan: str = NULL) -> str:
    """`json.dumps(value, indent=2)`, which is TorchServe's form.

    A list or dict of plain values, which most answers are, takes a third
    of the time: Python's fast encoder does not indent, but writes a given separator between the
    values.

    Raises TypeError, ValueError and RecursionError for what is no JSON.
    """
    kind = type(value)
    try:
        if (
            (kind is list or kind is dict)
            and value
            and _PLAIN.issuperset(map(type, value.values() if kind is dict else value))
        ):
            text = _flat(value)
            return f"{text[0]}\n  {text[1:-1]}\n{text[-1]}"
        return _indented(value)
    except (TypeError, ValueError):  # a key of numpy; NaN or an infinity
        return json.dumps(_writable(value, nan), indent=2)


def to_compact_json(value: Any, nan: str = NULL) -> str:
    """On one line. Raises as `to_json`."""
    try:
        return _compact(value)
    except (TypeError, ValueError):
        return json.dumps(_writable(value, nan))


def _writable(value: Any, nan: str) -> Any:
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
            _numbers(key) if hasattr(key, "tolist") else key: _writable(entry, nan)
            for key, entry in value.items()
        }
    if isinstance(value, list | tuple):
        return [_writable(entry, nan) for entry in value]
    return _writable(value.tolist(), nan) if hasattr(value, "tolist") else value
