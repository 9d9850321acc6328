"""The parser and the cache of request heads (request line and headers) for the fast lane.

A client that reuses its connection sends the same head again and again. A head is therefore looked
up in a cache by its bytes, and parsed only if it is new. The result depends only on these bytes and
the registered models.
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

    It is cached with the head, so that a flood of such requests takes little time.
    """

    client_timeout = 0.0
    name = version = ""  # fields of the access log

    def __init__(self, error: TsxError, delay_s: float = 0.0) -> None:
        """Refuse with `error` after `delay_s` seconds; its connection's later requests wait too."""
        self.error = error
        self._delay_s = delay_s

    def route_for_headers(self, headers: Headers) -> RefusalRoute:
        return self

    def submit(self, job: Job) -> None:
        if self._delay_s:
            asyncio.get_running_loop().call_later(self._delay_s, job.refuse, self.error)
        else:
            job.refuse(self.error)

    def leave(self, job: Job) -> None:
        """Do nothing, because the job was never submitted."""


MAX_CACHED = 1024  # heads, and URLs, that are cached
MAX_CACHED_BYTES = 4096  # largest head or URL that is cached
TOKEN_EXPIRY_DELAY_S = (
    0.05  # makes sure that the token has expired, because timers may fire a little early
)

# methods with special framing or responses
_OTHER_LANE_METHODS = {b"HEAD", b"OPTIONS", b"CONNECT"}
ValueT = TypeVar("ValueT")


class Head(NamedTuple):
    """The data of a request that the fast lane knows before the body arrives."""

    target: Target
    meta: bytes  # the result of `wire.request_meta`, without the request id
    length: int  # length of the body in bytes
    keep_alive: bool
    priority: int
    timeout_ms: int | None  # the client's timeout
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


# None means that the other lane handles the head. A refused head has a `RefusalRoute`.
CachedHead: TypeAlias = tuple[Head, Route] | None


class Heads:
    """The cached heads of one listener, each with its route: a version, or a splitter."""

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
        """Create an empty cache; changes of the registry or the token clear it.

        Args:
            registry: The models.
            guard: The guard of predictions.
            limit: The largest body in bytes.
            max_head: The largest head in bytes.
            traced: Whether requests are traced.
            platform: The hook of a platform; the other lane handles its requests.
            missing_route: Returns the error of a path that has no route in FastAPI, or None if it
                may have one.
        """
        self.entries: dict[bytes, CachedHead] = {}
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

    def look_up(self, raw: bytes) -> CachedHead:
        """Return the cached head for these bytes, or parse and cache it."""
        return self.entries[raw] if raw in self.entries else self.read(raw)

    def read(self, raw: bytes) -> CachedHead:
        """Parse a head, including its empty line, and cache the result."""
        entry = (
            self._read(raw)
            if len(raw) <= self._max_head and raw.count(b"\n") <= MAX_HEADERS + 2
            else None
        )
        if len(raw) <= MAX_CACHED_BYTES:
            _store(
                self.entries,
                raw,
                entry,
                evict=entry is not None and not isinstance(entry[1], RefusalRoute),
            )
        return entry

    def find_again(self, head: Head) -> Route:
        """Resolve the route of a head again, once the body is complete.

        Raises:
            TsxError: The model does not exist any more.
        """
        return self._route(head.target, head.headers)

    def _read(self, raw: bytes) -> CachedHead:
        parsed = parse_head(raw)
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
        awaits_continue = expects_continue(parsed.headers)
        # There is no body to wait for. The other lane sends "100 Continue".
        if awaits_continue and not length:
            return None
        try:
            if not isinstance(url, _MissingRoute):
                if self._guard is not None:
                    self._guard.check(parsed.headers)
                priority, timeout_ms = priority_and_timeout(parsed.headers)
            if isinstance(url, TsxError):
                raise url
        except TsxError as error:
            return (
                None
                if awaits_continue or self._traced
                else _build_refused_head(error.with_traceback(None), raw, parsed, length)
            )
        block = wire.header_block(
            with_headers(
                parsed.cased_headers,
                url.target,
                self._registry.hidden_headers.for_model(url.route.name),
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
            awaits_continue,
            line,
            parsed.headers,
            timing,
            parent,
        )
        return head, url.route.route_for_headers(parsed.headers)

    def _find_url(self, text: bytes) -> _Url | TsxError | None:
        """Return the parsed URL, or its error, or None if the other lane handles it."""
        try:
            return self._urls[text]
        except KeyError:
            url: _Url | TsxError | None = None
            with suppress(httptools.HttpParserInvalidURLError, UnicodeDecodeError):
                parsed = httptools.parse_url(text)
                url = self._resolve_url(
                    unquote((parsed.path or b"").decode("ascii")), parsed.query or b""
                )
            if len(text) <= MAX_CACHED_BYTES:
                _store(self._urls, text, url, evict=isinstance(url, _Url))
            return url

    def _resolve_url(self, path: str, query: bytes) -> _Url | TsxError | None:
        target = None
        try:
            target = find_target(path, query)
            if target is not None:
                return _Url(target, query if target.query else b"", self._route(target))
        except TsxError as error:
            if (
                target is not None and target.name is None
            ):  # The model's name may be in the body, if that is a form.
                return None
            return error.with_traceback(None)
        missing_route = self._missing_route(path)
        return missing_route and _MissingRoute(missing_route.message)

    def _route(self, target: Target, headers: Headers = ()) -> Route:
        return (
            BodyRoute(self._registry, target, headers)
            if target.in_body
            else resolve(self._registry, target, headers)
        )

    def _clear_for_token(self) -> None:
        """Clear the cache after a change of the token, and again once the new token expires."""
        assert self._key is not None
        self._clear()
        self._expiry_timer.cancel()
        self._expiry_timer = asyncio.get_running_loop().call_later(
            (self._key.seconds_left or 0.0) + TOKEN_EXPIRY_DELAY_S, self._clear
        )

    def _clear(self) -> None:
        self.entries.clear()
        self._urls.clear()


class _MissingRoute(ResourceNotFound):
    """The error of a path without a route, which is raised before the token is checked."""


def _build_refused_head(error: TsxError, raw: bytes, parsed: ParsedHead, length: int) -> CachedHead:
    path = httptools.parse_url(parsed.url).path or b""
    convert = converter_for_path(unquote(path.decode("ascii")))
    if convert is to_openai_error:
        set_openai_status(error)
    meta = (
        b"\r\n\r\n" if convert is None else OPENAI_META if convert is to_openai_error else V2_META
    )
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
    """Tell whether this lane can handle a URL whose model is in the body or missing."""
    return raw.startswith(b"POST ") if target.in_body else not is_form(headers)


def _first_line(raw: bytes) -> str:
    return str(raw[: raw.find(b"\r\n")], "latin-1")


def _store(table: dict[bytes, ValueT], key: bytes, value: ValueT, *, evict: bool) -> None:
    """Add an entry to a table; if the table is full, clear it first, but only with `evict`.

    Refusals do not evict, because a flood of them would remove the heads of other clients.
    """
    if len(table) >= MAX_CACHED:
        if not evict:
            return
        table.clear()
    table[key] = value


def cannot_be_head(received: bytes | bytearray) -> bool:
    """Tell whether bytes are of another protocol, or have lines without CR."""
    return not received[:1].isupper() or b"\n\n" in received


def parse_head(raw: bytes) -> ParsedHead | None:
    """Parse one whole head, or return None if it is not plain HTTP/1.1."""
    parsed = ParsedHead()
    parsed.parser = parser = httptools.HttpRequestParser(parsed)
    try:
        parser.feed_data(raw)
    # Java's HTTP client offers an upgrade to HTTP/2 with each request, which is ignored.
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
    """A head whose fields the parser's callbacks set."""

    url = b""
    messages = 0
    is_complete = False
    has_body = False
    keep_alive = True
    parser: httptools.HttpRequestParser | None = None

    def __init__(self) -> None:
        self.headers: list[Pair] = []  # headers with names in lower case
        self.cased_headers: list[Pair] = []  # headers with the original case of their names

    def on_message_begin(self) -> None:
        self.messages += 1

    def on_url(self, url: bytes) -> None:
        self.url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value))
        self.cased_headers.append((name, value))

    def on_headers_complete(self) -> None:
        self.is_complete = True
        if self.parser is not None:
            # The parser must be asked now: after a request without a body, it would return True.
            self.keep_alive = self.parser.should_keep_alive()

    def on_body(self, body: bytes) -> None:
        self.has_body = True


def body_length(headers: list[Pair]) -> int | None:
    """Return the length of the body, or None if only the other lane can handle it."""
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
