"""The files of the web page in `static/`, and the headers that restrict a browser to them."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

FOLDER = Path(__file__).resolve().with_name("static")
SHELL = "index.html"
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}

# Nothing from anywhere else, nothing inline, and no page around it; pictures that a user picks are shown from memory (blob:).
POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self' blob: data:",
        "connect-src 'self'",
        "form-action 'none'",
        "base-uri 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
    )
)
DATA_HEADERS = {"x-content-type-options": "nosniff", "cross-origin-resource-policy": "same-origin"}  # read by the page, and by no other
HEADERS = DATA_HEADERS | {
    "content-security-policy": POLICY,
    "permissions-policy": "camera=(self), microphone=(), geolocation=()",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
}


class File(NamedTuple):
    body: bytes
    type: str


@lru_cache(maxsize=1)
def files() -> dict[str, File]:
    """By name. Read at the first request for the page: most servers never get one."""
    found = sorted(path for path in FOLDER.iterdir() if path.suffix in TYPES)
    return {path.name: File(path.read_bytes(), TYPES[path.suffix]) for path in found}
