"""Guesses the content type of a file, or of an answer."""

from __future__ import annotations

import json
import mimetypes

JSON, TEXT, BYTES = "application/json", "text/plain; charset=utf-8", "application/octet-stream"


def guess_content_type(name: str, data: bytes) -> str:
    """From the name where it says anything, else from the bytes."""
    guess, encoding = mimetypes.guess_type(name, strict=False)
    if guess is not None and encoding is None:
        return guess
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        return BYTES
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return TEXT
    return JSON


def looks_like(body: bytes | bytearray | memoryview, *, part: bool = False) -> str:
    """The content type of an answer without one. A `part` of a stream is not taken for JSON: several values are no JSON document."""
    if not part and bytes(body[:1]) in (b"{", b"[", b'"'):
        return JSON
    try:
        str(body, "utf-8")
    except UnicodeDecodeError:
        return BYTES
    return TEXT
