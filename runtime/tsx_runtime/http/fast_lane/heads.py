"""The parser and the cache of request heads for the fast lane: request line and headers.

A client that keeps its connection sends the same head again and again. The bytes of a head are
therefore looked up among known ones, and only a new head is parsed. The result depends only on
these bytes and the registered models.
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
from tsx_runtime.api.access.origins import has_one_host
from tsx_runtime.api.errors import converter_for_path, set_openai_status, to_openai_error
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
    """A `Route` that refuses its jobs: their token is wrong, or their model or path is unknown.

    It is remembered with the head, so that a flood of such requests is cheap.
    """

    client_timeout = 0.0
    name = version = ""  # fields of the access log

    def __init__(self, error: TsxError, delay_s: float = 0.0) -> None:
        """Refuse with `error` after `delay_s` seconds, which delays the whole connection."""
        self.error = error
        self._delay_s = delay_s

    def by_head(self, headers: Headers) -> RefusalRoute:
        return self

    def submit(self, job: Job) -> None:
        if self._delay_s:
            asyncio.get_running_loop().call_later(self._delay_s, job.refuse, self.error)
        else:
            job.refuse(self.error)

    def leave(self, job: Job) -> None:
        """Do nothing, because the job runs nowhere."""


MAX_REMEMBERED = 1024  # size of the table of heads, and of that of URLs
MAX_REMEMBERED_BYTES = 4096  # size of a head or a URL
TOKEN_EXPIRY_DELAY_S = 0.05  # Timers may fire a little early.

# Methods with special framing or responses.
_OTHER_LANE_METHODS = {b"HEAD", b"OPTIONS", b"CONNECT"}
ValueT = TypeVar("ValueT")


class Head(NamedTuple):
    """The facts that the fast lane needs about a request before its body arrives."""

    target: Target
    meta: bytes  # the result of `wire.request_meta`, without the request id
    length: int  # bytes of the body
    keep_alive: bool
    priority: int
    timeout_ms: int | None  # time that the client will wait
    expects_continue: bool  # whether the client sends the body only after "100 Continue"
    line: str  # the request line, for the access log
    headers: list[Pair]  # headers with names in lower case, for the splitter
    timing: TimingRequest | None
    parent: Parent | None  # the parent span, if requests are traced


class _Url(NamedTuple):
    """A URL that runs a model."""

    target: Target
    query: bytes
    route: Route


# A known head; None is one of the other lane. A refused head has a `RefusalRoute`.
Known: TypeAlias = tuple[Head, Route] | None


class Heads:
    """The known heads of one listener, with the route of each: a version, or a splitter."""

    def __init__(
        self,
        registry: Registry,
        guard: Guard | None,
        limit: int,
        max_head: int,
        *,
        traced: bool = False,
        platform: PlatformHook | None = None,
        missing_route: Callable[[str], ResourceNotFound | None] = lambda path: None,
    ) -> None:
        """Create an empty cache, which registry and token changes clear.

        Args:
            registry: The models.
            guard: The guard of predictions.
            limit: The largest body in bytes.
            max_head: The largest head in bytes.
            traced: Whether requests are traced.
            platform: The hook of a platform, whose requests take the other lane.
            missing_route: A function that returns the error of a path without a FastAPI route, or
                None if there may be a route.
        """
        self.known: dict[bytes, Known] = {}
        self._urls: dict[bytes, _Url | TsxError | None] = {}
        self._missing_route = missing_route
        self._registry = registry
        self._guard = guard
        self._limit = limit
        self._max_head = max_head
        self._traced = traced
        self._platform = platform
        registry.on_change.append(self._clear)
        self._key = guard.key if guard is not None else None
        if self._key is not None and self._key.lifetime is not None:
            self._key.on_change.append(self._clear_for_token)
            self._expiry_timer = asyncio.get_running_loop().call_later(
                (self._key.seconds_left or 0.0) + TOKEN_EXPIRY_DELAY_S, self._clear
            )

    def look_up(self, raw: bytes) -> Known:
        """Return a known head, or read it."""
        return self.known[raw] if raw in self.known else self.read(raw)

    def read(self, raw: bytes) -> Known:
        """Parse a head that is not known yet, empty line included, and remember it."""
        known = (
            self._read(raw)
            if len(raw) <= self._max_head and raw.count(b"\n") <= MAX_HEADERS + 2
            else None
        )
        if len(raw) <= MAX_REMEMBERED_BYTES:
            _remember(
                self.known,
                raw,
                known,
                evict=known is not None and not isinstance(known[1], RefusalRoute),
            )
        return known

    def find_again(self, head: Head) -> Route:
        """Return the route of a head again, once its body is complete.

        Raises:
            TsxError: The model does not exist any more.
        """
        return self._route(head.target, head.headers)

    def _read(self, raw: bytes) -> Known:
        parsed = parse(raw)
        if (
            parsed is None
            or (length := body_length(parsed.headers)) is None
            or length > self._limit
        ):
            return None
        if (
            not has_one_host(parsed.headers, "1.1")
            or clashing_names(parsed.headers)
            or is_stored(parsed.headers)
        ):
            return None
        if self._platform is not None and self._platform.wants(
            parsed.url.partition(b"?")[0], parsed.headers
        ):
            return None
        url = self._find_url(parsed.url)
        if url is None:
            return None
        if (
            isinstance(url, _Url)
            and url.target.name is None
            and not _is_plain(url.target, raw, parsed.headers)
        ):
            return None
        expects = expects_continue(parsed.headers)
        # Without a body there is nothing to wait for, and the other lane sends "100 Continue".
        if expects and not length:
            return None
        try:
            if not isinstance(url, _NoRoute):
                if self._guard is not None:
                    self._guard.check(parsed.headers)
                priority, timeout_ms = priority_and_timeout(parsed.headers)
            if isinstance(url, TsxError):
                raise url
        except TsxError as error:
            return (
                None
                if expects or self._traced
                else _refused_head(error.with_traceback(None), raw, parsed, length)
            )
        block = wire.header_block(
            with_headers(
                parsed.as_sent, url.target, self._registry.hidden_headers.for_model(url.route.name)
            )
        )
        meta = b"\r\n%b\r\n%b" % (url.query, block)
        line = _first_line(raw)
        timing = parse_timing_request(parsed.headers)
        parent = parent_of(parsed.headers) if self._traced else None
        head = Head(
            url.target,
            meta,
            length,
            parsed.keep_alive,
            priority,
            timeout_ms,
            expects,
            line,
            parsed.headers,
            timing,
            parent,
        )
        return head, url.route.by_head(parsed.headers)

    def _find_url(self, text: bytes) -> _Url | TsxError | None:
        """Return a parsed URL, an error for each request with it, or None for the other lane."""
        try:
            return self._urls[text]
        except KeyError:
            url: _Url | TsxError | None = None
            with suppress(httptools.HttpParserInvalidURLError, UnicodeDecodeError):
                parsed = httptools.parse_url(text)
                url = self._resolve_url(
                    unquote((parsed.path or b"").decode("ascii")), parsed.query or b""
                )
            if len(text) <= MAX_REMEMBERED_BYTES:
                _remember(self._urls, text, url, evict=isinstance(url, _Url))
            return url

    def _resolve_url(self, path: str, query: bytes) -> _Url | TsxError | None:
        target = None
        try:
            target = find_target(path, query)
            if target is not None:
                return _Url(target, query if target.query else b"", self._route(target))
        except TsxError as error:
            if target is not None and target.name is None:  # A form may name the model.
                return None
            return error.with_traceback(None)
        missing_route = self._missing_route(path)
        return missing_route and _NoRoute(missing_route.message)

    def _route(self, target: Target, headers: Headers = ()) -> Route:
        return (
            BodyRoute(self._registry, target, headers)
            if target.in_body
            else resolve(self._registry, target, headers)
        )

    def _clear_for_token(self) -> None:
        """Clear the cache after a change of the token, and again when the new one expires."""
        assert self._key is not None
        self._clear()
        self._expiry_timer.cancel()
        self._expiry_timer = asyncio.get_running_loop().call_later(
            (self._key.seconds_left or 0.0) + TOKEN_EXPIRY_DELAY_S, self._clear
        )

    def _clear(self) -> None:
        self.known.clear()
        self._urls.clear()


class _NoRoute(ResourceNotFound):
    """The error of a path that has no route, with or without a token."""


def _refused_head(error: TsxError, raw: bytes, parsed: ParsedHead, length: int) -> Known:
    path = httptools.parse_url(parsed.url).path or b""
    form = converter_for_path(unquote(path.decode("ascii")))
    if form is to_openai_error:
        set_openai_status(error)
    meta = b"\r\n\r\n" if form is None else OPENAI_META if form is to_openai_error else V2_META
    head = Head(
        Target(None),
        meta,
        length,
        parsed.keep_alive,
        0,
        None,
        False,
        _first_line(raw),
        parsed.headers,
        None,
        None,
    )
    return head, RefusalRoute(error)


def _is_plain(target: Target, raw: bytes, headers: list[Pair]) -> bool:
    """Tell whether the body of a URL without a model may be read in this lane."""
    return raw.startswith(b"POST ") if target.in_body else not is_form(headers)


def _first_line(raw: bytes) -> str:
    return str(raw[: raw.find(b"\r\n")], "latin-1")


def _remember(table: dict[bytes, ValueT], key: bytes, value: ValueT, *, evict: bool) -> None:
    """Add an entry to a table; if it is full, clear it before with `evict`.

    Refusals do not evict, because a flood of them must not remove the heads of other clients.
    """
    if len(table) >= MAX_REMEMBERED:
        if not evict:
            return
        table.clear()
    table[key] = value


def cannot_be_head(received: bytes | bytearray) -> bool:
    """Tell whether bytes cannot begin a head: another protocol, or lines without CR."""
    return not received[:1].isupper() or b"\n\n" in received


def parse(raw: bytes) -> ParsedHead | None:
    """Parse one whole head; None is returned for all others than plain HTTP/1.1."""
    parsed = ParsedHead()
    parsed.parser = parser = httptools.HttpRequestParser(parsed)
    try:
        parser.feed_data(raw)
    # Java's client offers HTTP/2 with each request, which the server ignores.
    except httptools.HttpParserUpgrade:
        if parser.get_method() == b"GET" and (b"upgrade", b"websocket") in (
            (name, value.lower()) for name, value in parsed.headers
        ):
            return None
    except httptools.HttpParserError:
        return None
    finally:
        parsed.parser = None
    if (
        parsed.messages != 1
        or not parsed.is_complete
        or parsed.has_body
        or parser.get_http_version() != "1.1"
    ):
        return None
    if parser.get_method() in _OTHER_LANE_METHODS:
        return None
    return parsed


class ParsedHead:
    """A head that a parser fills by its callbacks."""

    url = b""
    messages = 0
    is_complete = False
    has_body = False
    keep_alive = True
    parser: httptools.HttpRequestParser | None = None

    def __init__(self) -> None:
        self.headers: list[Pair] = []  # headers with names in lower case
        self.as_sent: list[Pair] = []  # headers with names as handlers see them

    def on_message_begin(self) -> None:
        self.messages += 1

    def on_url(self, url: bytes) -> None:
        self.url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value))
        self.as_sent.append((name, value))

    def on_headers_complete(self) -> None:
        self.is_complete = True
        if self.parser is not None:
            # Behind the end of a message without a body, this would always be true.
            self.keep_alive = self.parser.should_keep_alive()

    def on_body(self, body: bytes) -> None:
        self.has_body = True


def body_length(headers: list[Pair]) -> int | None:
    """Return the length of the body, or None if only the other lane can read it."""
    length = 0
    for name, value in headers:
        if name == b"content-length":
            if not value.isdigit() or len(value) > MAX_LENGTH_DIGITS:
                return None
            length = int(value)
        elif name in (b"transfer-encoding", b"trailer", b"content-encoding"):
            return None
    return length


def expects_continue(headers: list[Pair]) -> bool:
    """Tell whether the client waits for "100 Continue"; both lanes ignore other expectations."""
    return any(name == b"expect" and value.lower() == b"100-continue" for name, value in headers)
