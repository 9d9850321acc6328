"""Guesses the content type of a file, or of an answer."""

from __future__ import annotations

import json
import mimetypes
import re
from collections.abc import Sequence

from python_multipart.multipart import parse_options_header

_WEIGHT = re.compile(rb"0?\.\d+|[01]\.?0*")
MOST_ACCEPTED = 100  # types of an Accept header that are read
JSON, TEXT, BYTES = "application/json", "text/plain; charset=utf-8", "application/octet-stream"


def best_type(accept: str, offers: Sequence[str]) -> str | None:
    """Choose by an Accept header (RFC 9110, section 12.5.1).

    The weight counts first, then the client's order, then that of the offers. None: nothing is
    accepted. Types behind the first hundred are ignored.
    """
    ranges: dict[str, tuple[float, int]] = {}
    for position, part in enumerate(accept.split(",", MOST_ACCEPTED)[:MOST_ACCEPTED]):
        kind, options = parse_options_header(part)
        weight = options.get(b"q", b"1")
        ranges[kind.decode("latin-1") or "*/*"] = (
            float(weight) if _WEIGHT.fullmatch(weight) else 0,
            -position,
        )

    def rank(offer: str) -> tuple[float, int]:
        names = (offer, f"{offer.partition('/')[0]}/*", "*/*")  # the most specific one counts
        return next((ranges[name] for name in names if name in ranges), (0, 0))

    best = max(offers, key=rank)
    return best if rank(best)[0] else None


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
    """The content type of an answer without one.

    A `part` of a stream is not taken for JSON: several values are no JSON document.
    """
    if not part and bytes(body[:1]) in (b"{", b"[", b'"'):
        return JSON
    try:
        str(body, "utf-8")
    except UnicodeDecodeError:
        return BYTES
    return TEXT
