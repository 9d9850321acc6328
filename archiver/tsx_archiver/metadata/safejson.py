"""The parsing of untrusted JSON with bounds, since the parser blocks the interpreter."""

from __future__ import annotations

import json
from typing import Any

MAX_DEPTH = 64
MAX_DIGITS = 4300  # digits of an integer; Python's own bound, which early releases of 3.10 lack


def load_json(content: bytes, *, most_bytes: int, most_values: int) -> Any:
    """Parse JSON.

    Values are counted by commas and brackets, including those in texts, which is fast.

    Raises:
        ValueError: The content is no JSON, or exceeds a bound.
    """
    if len(content) > most_bytes:
        raise ValueError(f"it has {len(content)} bytes; at most {most_bytes} are read")
    if sum(map(content.count, (b",", b"[", b"{"))) > most_values:
        raise ValueError(f"it has more than {most_values} values (commas and brackets)")
    try:
        value = json.loads(content, parse_int=_int)
    except RecursionError:
        raise ValueError(f"it is nested more than {MAX_DEPTH} deep") from None
    _check_depth(value)
    return value


def _int(text: str) -> int:
    if len(text) > MAX_DIGITS:
        raise ValueError(f"a number has {len(text)} digits; at most {MAX_DIGITS} are read")
    return int(text)


def _check_depth(value: Any) -> None:
    """Refuse a deep value without recursion, so that later code may recurse."""
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
