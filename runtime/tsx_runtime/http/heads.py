"""The head of a request for the fast lane: request line and headers, read once and remembered.

A client that keeps its connection sends the same head again and again, so the bytes of a head are looked up among those that
were read before, and only a new one is parsed. What a head says depends on nothing but its bytes: a client that sends each
head but once pays for the parser, as everywhere else.
"""

from __future__ import annotations

from typing import NamedTuple
from urllib.parse import unquote

import httptools

from tsx_runtime import wire
from tsx_runtime.errors import TsxError
from tsx_runtime.http.asgi import Pair
from tsx_runtime.http.auth import Guard
from tsx_runtime.http.routes import Target, find_target, is_form, with_headers

END = b"\r\n\r\n"
REMEMBERED = 1024  # heads
LONGEST = 4096  # bytes of a head that is remembered

_OTHER_LANE = {b"HEAD", b"OPTIONS", b"CONNECT"}  # methods with framing or answers of their own


class Head(NamedTuple):
    """What the fast lane needs to know of a request before its body is there."""

    target: Target
    meta: bytes  # of the request (see `wire.request_meta`), without its id
    length: int  # bytes of the body
    keep_alive: bool


class Heads:
    """Reads heads for one listener."""

    def __init__(self, guard: Guard | None) -> None:
        self._guard = guard
        self._known: dict[bytes, Head | None] = {}

    def find(self, raw: bytes) -> Head | None:
        """`raw` ends with the empty line. None: this request is for the other lane, which also tells what is wrong with it."""
        try:
            return self._known[raw]
        except KeyError:
            head = read_head(raw, self._guard)
            if len(raw) <= LONGEST:
                if len(self._known) >= REMEMBERED:
                    self._known.clear()
                self._known[raw] = head
            return head


def read_head(raw: bytes, guard: Guard | None) -> Head | None:
    """A plain request to run a model: HTTP/1.1, a body of a length that is told before, and leave to call it."""
    found = _Found()
    parser = httptools.HttpRequestParser(found)
    try:
        parser.feed_data(raw)
        url = httptools.parse_url(found.url)
    except (httptools.HttpParserError, httptools.HttpParserUpgrade):
        return None
    if found.messages != 1 or not found.complete or found.has_body or parser.get_http_version() != "1.1":
        return None
    if parser.get_method() in _OTHER_LANE or parser.should_upgrade():
        return None
    length = _length(found.headers)
    if length is None:
        return None
    try:
        target = find_target(unquote(url.path.decode("ascii")), url.query or b"")
        if target is None or (target.name is None and is_form(found.headers)):
            return None
        if guard is not None:
            guard.check(found.headers)
    except (TsxError, UnicodeDecodeError):
        return None
    block = wire.header_block(with_headers(found.headers, target.headers))
    return Head(target, b"\r\n%b\r\n%b" % (url.query or b"", block), length, parser.should_keep_alive())


class _Found:
    """What the parser calls out."""

    def __init__(self) -> None:
        self.url = b""
        self.headers: list[Pair] = []
        self.messages = 0
        self.complete = False
        self.has_body = False

    def on_message_begin(self) -> None:
        self.messages += 1

    def on_url(self, url: bytes) -> None:
        self.url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self.complete = True

    def on_body(self, body: bytes) -> None:
        self.has_body = True


def _length(headers: list[Pair]) -> int | None:
    """The body's length, or None where only the other lane can read the body."""
    length = 0
    for name, value in headers:
        if name == b"content-length":
            if not value.isdigit():
                return None
            length = int(value)
        elif name in (b"transfer-encoding", b"expect", b"upgrade", b"trailer"):
            return None
    return length
