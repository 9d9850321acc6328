"""Parses and caches the heads of requests for the fast lane: request line and headers.

A client that keeps its connection sends the same head again and again, so the bytes of a head are
looked up among those that were read before, and only a new one is parsed. What is read depends on
nothing but the bytes of the head and the table of models: a client that sends each head only once
pays for the parser, as with any other server.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple, TypeAlias, TypeVar
from urllib.parse import unquote

import httptools

from tsx_runtime import wire
from tsx_runtime.api.access.auth import Guard
from tsx_runtime.api.access.origins import names_one_host
from tsx_runtime.api.errors import as_openai, for_openai, form_of_path
from tsx_runtime.api.headers import Pair, clashing_names
from tsx_runtime.api.messages import MAX_HEADERS, MAX_LENGTH_DIGITS, PlatformHook
from tsx_runtime.api.request_options import is_stored, priority_and_timeout
from tsx_runtime.api.server_timing import TimingRequest, parse_timing_request
from tsx_runtime.api.urls import Target, find_target, is_form, resolve, with_headers
from tsx_runtime.core.registry.registry import Registry
from tsx_runtime.core.scheduling.job import Headers, Job, Route
from tsx_runtime.core.telemetry.tracing import Parent, parent_of
from tsx_runtime.errors import ResourceNotFound, TsxError
from tsx_runtime.http.fast_lane.body_routes import BodyRoute
from tsx_runtime.wire import OPENAI_META, V2_META


class RefusalRoute:
    """A `Route` that refuses what is submitted to it: a request with a wrong token, or for a model
    or path that is not known.

    It is remembered with the head, so that a flood of such requests costs no more than answers do.
    """

    client_timeout = 0.0
    name = version = ""  # of the model, in the access log

    def __init__(self, error: TsxError, hold: float = 0.0) -> None:
        """`hold`: seconds for which the answer is held back, and with it whatever its connection
        sends next.
        """
        self.error = error
        self._hold = hold

    def by_head(self, headers: Headers) -> RefusalRoute:
        return self

    def submit(self, job: Job) -> None:
        if self._hold:
            asyncio.get_running_loop().call_later(self._hold, job.refuse, self.error)
        else:
            job.refuse(self.error)

    def leave(self, job: Job) -> None:
        """The client is gone; there is nothing to cancel."""


REMEMBERED = 1024  # heads, and URLs
LONGEST = 4096  # bytes of a head, or of a URL, that is remembered
LATE = 0.05  # seconds after the end of a token: timers may go off a little early

_OTHER_LANE = {b"HEAD", b"OPTIONS", b"CONNECT"}  # methods with framing or answers of their own
ValueT = TypeVar("ValueT")


class Head(NamedTuple):
    """The facts that the fast lane needs about a request before its body arrives."""

    target: Target
    meta: bytes  # of the request (see `wire.request_meta`), without its id
    length: int  # bytes of the body
    keep_alive: bool
    priority: int
    timeout_ms: int | None  # that the client will wait
    waits_for_go: bool  # whether the client sends the body only after "100 Continue"
    line: str  # its first, for the access log
    headers: list[Pair]  # names in lower case, for the splitter, which may route by them
    timing: TimingRequest | None
    parent: Parent | None  # of its trace, where requests are traced


class _Url(NamedTuple):
    target: Target
    query: bytes
    route: Route


Known: TypeAlias = (
    tuple[Head, Route] | None
)  # None: for the other lane. What no model answers has a `RefusalRoute` for its route


class Heads:
    """Reads heads for one listener, and finds the route of each: a version, or the splitter that
    picks one.
    """

    def __init__(
        self,
        registry: Registry,
        guard: Guard | None,
        limit: int,
        max_head: int,
        *,
        traced: bool = False,
        platform: PlatformHook | None = None,
        missing: Callable[[str], ResourceNotFound | None] = lambda path: None,
    ) -> None:
        """`missing`: the answer to a path for which FastAPI has no route; None where it may have
        one.
        """
        self.known: dict[bytes, Known] = {}
        self._urls: dict[bytes, _Url | TsxError | None] = {}
        self._missing = missing
        self._registry = registry
        self._guard = guard
        self._limit = limit  # bytes of a body
        self._max_head = max_head  # bytes
        self._traced = traced
        self._platform = platform
        registry.on_change.append(self._forget)
        self._key = guard.key if guard is not None else None
        if self._key is not None and self._key.lifetime is not None:
            self._key.on_change.append(self._forget_token)
            self._expire = asyncio.get_running_loop().call_later(
                (self._key.seconds_left or 0.0) + LATE, self._forget
            )

    def look_up(self, raw: bytes) -> Known:
        """Remembered or read."""
        return self.known[raw] if raw in self.known else self.read(raw)

    def read(self, raw: bytes) -> Known:
        """`raw` ends with the empty line, and is not among the known."""
        known = (
            self._read(raw)
            if len(raw) <= self._max_head and raw.count(b"\n") <= MAX_HEADERS + 2
            else None
        )
        if len(raw) <= LONGEST:
            _remember(
                self.known,
                raw,
                known,
                evict=known is not None and not isinstance(known[1], RefusalRoute),
            )
        return known

    def find_again(self, head: Head) -> Route:
        """Raises `TsxError` where what a head asked for is not there any more."""
        return self._route(head.target, head.headers)

    def _read(self, raw: bytes) -> Known:
        found = parse(raw)
        if found is None or (length := body_length(found.headers)) is None or length > self._limit:
            return None
        if (
            not names_one_host(found.headers, "1.1")
            or clashing_names(found.headers)
            or is_stored(found.headers)
        ):
            return None
        if self._platform is not None and self._platform.wants(
            found.url.partition(b"?")[0], found.headers
        ):
            return None
        url = self._url(found.url)
        if url is None:
            return None
        if (
            isinstance(url, _Url)
            and url.target.name is None
            and not _is_plain(url.target, raw, found.headers)
        ):
            return None
        waits = waits_for_go(found.headers)
        if (
            waits and not length
        ):  # there is nothing to wait for, and the other lane tells the client to go on
            return None
        try:
            if not isinstance(url, _NoRoute):
                if self._guard is not None:
                    self._guard.check(found.headers)
                priority, timeout_ms = priority_and_timeout(found.headers)
            if isinstance(url, TsxError):
                raise url
        except TsxError as error:
            return (
                None
                if waits or self._traced
                else _refused(error.with_traceback(None), raw, found, length)
            )
        block = wire.header_block(
            with_headers(
                found.as_sent, url.target, self._registry.hidden_headers.of(url.route.name)
            )
        )
        meta = b"\r\n%b\r\n%b" % (url.query, block)
        line = _first_line(raw)
        timing = parse_timing_request(found.headers)
        parent = parent_of(found.headers) if self._traced else None
        head = Head(
            url.target,
            meta,
            length,
            found.keep_alive,
            priority,
            timeout_ms,
            waits,
            line,
            found.headers,
            timing,
            parent,
        )
        return head, url.route.by_head(found.headers)

    def _url(self, text: bytes) -> _Url | TsxError | None:
        """None: a route of FastAPI's, or no URL.

        An error: the answer to every request for this URL.
        """
        try:
            return self._urls[text]
        except KeyError:
            url: _Url | TsxError | None = None
            with suppress(httptools.HttpParserInvalidURLError, UnicodeDecodeError):
                parsed = httptools.parse_url(text)
                url = self._find(unquote((parsed.path or b"").decode("ascii")), parsed.query or b"")
            if len(text) <= LONGEST:
                _remember(self._urls, text, url, evict=isinstance(url, _Url))
            return url

    def _find(self, path: str, query: bytes) -> _Url | TsxError | None:
        target = None
        try:
            target = find_target(path, query)
            if target is not None:
                return _Url(target, query if target.query else b"", self._route(target))
        except TsxError as error:
            if target is not None and target.name is None:  # a form may name the model
                return None
            return error.with_traceback(None)
        missing = self._missing(path)
        return missing and _NoRoute(missing.message)

    def _route(self, target: Target, headers: Headers = ()) -> Route:
        return (
            BodyRoute(self._registry, target, headers)
            if target.in_body
            else resolve(self._registry, target, headers)
        )

    def _forget_token(self) -> None:
        """It is another one: heads with the old one are not right any more, and those with the new
        one are not for ever.
        """
        assert self._key is not None
        self._forget()
        self._expire.cancel()
        self._expire = asyncio.get_running_loop().call_later(
            (self._key.seconds_left or 0.0) + LATE, self._forget
        )

    def _forget(self) -> None:
        self.known.clear()
        self._urls.clear()


class _NoRoute(ResourceNotFound):
    """There is no route for the path, with or without a token."""


def _refused(error: TsxError, raw: bytes, found: Found, length: int) -> Known:
    path = httptools.parse_url(found.url).path or b""
    form = form_of_path(unquote(path.decode("ascii")))
    if form is for_openai:
        as_openai(error)
    meta = b"\r\n\r\n" if form is None else OPENAI_META if form is for_openai else V2_META
    head = Head(
        Target(None),
        meta,
        length,
        found.keep_alive,
        0,
        None,
        False,
        _first_line(raw),
        found.headers,
        None,
        None,
    )
    return head, RefusalRoute(error)


def _is_plain(target: Target, raw: bytes, headers: list[Pair]) -> bool:
    """Whether this lane can read the model's name in the body, or it is the only model."""
    return raw.startswith(b"POST ") if target.in_body else not is_form(headers)


def _first_line(raw: bytes) -> str:
    return str(raw[: raw.find(b"\r\n")], "latin-1")


def _remember(table: dict[bytes, ValueT], key: bytes, value: ValueT, *, evict: bool) -> None:
    """In a full table, only what a model answers makes room: a flood of refusals must not push the
    heads of other clients out.
    """
    if len(table) >= REMEMBERED:
        if not evict:
            return
        table.clear()
    table[key] = value


def cannot_be_head(begun: bytes | bytearray) -> bool:
    """Whether what came so far begins no head that ever ends: another protocol (TLS), or lines
    without a carriage return.
    """
    return not begun[:1].isupper() or b"\n\n" in begun


def parse(raw: bytes) -> Found | None:
    """One whole head of HTTP/1.1 and nothing else, or None."""
    found = Found()
    found.parser = parser = httptools.HttpRequestParser(found)
    try:
        parser.feed_data(raw)
    except (
        httptools.HttpParserUpgrade
    ):  # an offer of HTTP/2 (Java's client makes it with every request), which is not spoken here
        if parser.get_method() == b"GET" and (b"upgrade", b"websocket") in (
            (name, value.lower()) for name, value in found.headers
        ):
            return None
    except httptools.HttpParserError:
        return None
    finally:
        found.parser = None
    if (
        found.messages != 1
        or not found.complete
        or found.has_body
        or parser.get_http_version() != "1.1"
    ):
        return None
    if parser.get_method() in _OTHER_LANE:
        return None
    return found


class Found:
    """The callbacks of the parser."""

    url = b""
    messages = 0
    complete = False
    has_body = False
    keep_alive = True
    parser: httptools.HttpRequestParser | None = None

    def __init__(self) -> None:
        self.headers: list[Pair] = []  # names in lower case
        self.as_sent: list[Pair] = []  # as handlers see them

    def on_message_begin(self) -> None:
        self.messages += 1

    def on_url(self, url: bytes) -> None:
        self.url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value))
        self.as_sent.append((name, value))

    def on_headers_complete(self) -> None:
        self.complete = True
        if self.parser is not None:
            self.keep_alive = (
                self.parser.should_keep_alive()
            )  # once a message without a body is over, it is always true

    def on_body(self, body: bytes) -> None:
        self.has_body = True


def body_length(headers: list[Pair]) -> int | None:
    """The body's length, or None where only the other lane can read the body."""
    length = 0
    for name, value in headers:
        if name == b"content-length":
            if not value.isdigit() or len(value) > MAX_LENGTH_DIGITS:
                return None
            length = int(value)
        elif name in (b"transfer-encoding", b"trailer", b"content-encoding"):
            return None
    return length


def waits_for_go(headers: list[Pair]) -> bool:
    """Any other expectation is none that HTTP knows, and means nothing on either lane."""
    return any(name == b"expect" and value.lower() == b"100-continue" for name, value in headers)
