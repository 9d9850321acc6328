"""The choice of a content type by an Accept header, and guesses from a file or a response."""

from __future__ import annotations

import json
import mimetypes
import re
from collections.abc import Sequence

from python_multipart.multipart import parse_options_header

_WEIGHT = re.compile(rb"0?\.\d+|[01]\.?0*")
MAX_ACCEPTED = 100  # media ranges that are read from an Accept header
JSON, TEXT, BYTES = "application/json", "text/plain; charset=utf-8", "application/octet-stream"


def best_type(accept: str, offers: Sequence[str]) -> str | None:
    """Choose the offer that an Accept header prefers (RFC 9110, section 12.5.1).

    The client's weight decides first, then the order in the header, then the order of `offers`.
    Ranges after the first MAX_ACCEPTED are ignored.

    Returns:
        None if the header accepts none of them.
    """
    ranges: dict[str, tuple[float, int]] = {}
    for position, part in enumerate(accept.split(",", MAX_ACCEPTED)[:MAX_ACCEPTED]):
        kind, options = parse_options_header(part)
        weight = options.get(b"q", b"1")
        ranges[kind.decode("latin-1") or "*/*"] = (
            float(weight) if _WEIGHT.fullmatch(weight) else 0,
            -position,
        )

    def rank(offer: str) -> tuple[float, int]:
        media_ranges = (offer, f"{offer.partition('/')[0]}/*", "*/*")  # most specific first
        return next((ranges[name] for name in media_ranges if name in ranges), (0, 0))

    best = max(offers, key=rank)
    return best if rank(best)[0] else None


def guess_content_type(name: str, data: bytes) -> str:
    """Guess the content type of a file by its name, or by its bytes if the name tells nothing."""
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
    """Guess the content type of a response by its bytes.

    A `part` of a stream is never JSON, since a sequence of values is not a JSON document.
    """
    if not part and bytes(body[:1]) in (b"{", b"[", b'"'):
        return JSON
    try:
        str(body, "utf-8")
    except UnicodeDecodeError:
        return BYTES
    return TEXT
