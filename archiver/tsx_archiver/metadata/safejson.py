"""The parsing of untrusted JSON with limits, since the parser blocks the interpreter."""

from __future__ import annotations

import json
from typing import Any

MAX_DEPTH = 64
# Python's own limit for the digits of an integer, which early releases of 3.10 lack.
MAX_DIGITS = 4300


def load_json(content: bytes, *, most_bytes: int, most_values: int) -> Any:
    """Parse JSON.

    The number of values is estimated before the parsing, as that of commas and opening brackets.
    Those inside strings count as well, because a precise count would be slow.

    Raises:
        ValueError: The content is not JSON, or exceeds a limit.
    """
    if len(content) > most_bytes:
        raise ValueError(f"it has {len(content)} bytes; at most {most_bytes} are read")
    if sum(map(content.count, (b",", b"[", b"{"))) > most_values:
        raise ValueError(f"it has more than {most_values} values (commas and brackets)")
    try:
        value = json.loads(content, parse_int=_parse_int)
    except RecursionError:
        raise ValueError(f"it is nested more than {MAX_DEPTH} deep") from None
    _check_depth(value)
    return value


def _parse_int(text: str) -> int:
    if len(text) > MAX_DIGITS:
        raise ValueError(f"a number has {len(text)} digits; at most {MAX_DIGITS} are read")
    return int(text)


def _check_depth(value: Any) -> None:
    """Refuse a deeply nested value, so that later code may recurse.

    The check itself does not recurse.
    """
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [
            child
            for value in level
            if isinstance(value, dict | list)
            for child in (value.values() if isinstance(value, dict) else value)
            if isinstance(child, dict | list)
        ]
        if not level:
            return
    raise ValueError(f"it is nested more than {MAX_DEPTH} deep")
