"""Guesses the content type of a file."""

from __future__ import annotations

import json
import mimetypes


def guess_content_type(name: str, data: bytes) -> str:
    """From the name where it says anything, else from the bytes."""
    guess, encoding = mimetypes.guess_type(name, strict=False)
    if guess is not None and encoding is None:
        return guess
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        return "application/octet-stream"
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return "text/plain; charset=utf-8"
    return "application/json"
