"""Functions that read a request's body and write a response by ASGI messages."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Coroutine, MutableMapping
from typing import Any, Protocol, TypeAlias, TypeVar
from urllib.parse import quote

from tsx_runtime.api.encodings import COMPRESSED, SENDER_MORE, decompress, window_of
from tsx_runtime.api.headers import Pair, new_request_id, shown_headers
from tsx_runtime.core.scheduling.byte_budget import MAX_UNCOUNTED_BYTES, ByteBudget
from tsx_runtime.errors import NoRoom, PayloadTooLarge, TsxError

MAX_HEADERS = 200  # headers of one request
MAX_MANAGEMENT_BODY = 1 << 20  # bytes
HEADER_NAMES = (
    "tsx.header_names"  # key of a scope: the header names in their original case and order
)
Scope: TypeAlias = MutableMapping[str, Any]
Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]
App: TypeAlias = Callable[[Scope, Receive, Send], Awaitable[None]]
ResultT = TypeVar("ResultT")

MAX_PIECES = 1024  # parts of a body; more are joined, because a client may send it byte by byte
MAX_LENGTH_DIGITS = 19  # digits of a Content-Length
COUNTED_BYTES = "tsx.counted"  # key of a scope: its `CountedBytes`
CLIENT_LEFT = (
    "tsx.client_left"  # key of a WebSocket's scope: the event that is set when its client leaves
)
REQUEST_ID = "tsx.request_id"  # key of a scope: the request id that a proxy has chosen
# Bytes of a refused body that are discarded; a client that cannot send might not read the refusal.
MAX_DISCARDED_BYTES = 64 << 20


class ClientGone(Exception):
    """The client closed the connection before its request was complete."""


class CountedBytes:
    """The bytes that one request's body takes from the server's budget until the request ends."""

    __slots__ = ("_budget", "_size")

    def __init__(self, budget: ByteBudget) -> None:
        self._budget = budget
        self._size = 0

    def grow_to(self, size: int) -> None:
        """Count more bytes.

        Raises:
            NoRoom: The budget has no room for them.
        """
        if size > MAX_UNCOUNTED_BYTES:
            self._budget.take(size - self._size)
            self._size = size

    def shrink_to(self, size: int) -> None:
        """Give back the bytes over `size`."""
        counted_size = min(self._size, size) if size > MAX_UNCOUNTED_BYTES else 0
        self._budget.give(self._size - counted_size)
        self._size = counted_size

    def give_back(self) -> None:
        self.shrink_to(0)


def request_id_of(scope: Scope) -> bytes:
    request_id: bytes | None = scope.get(REQUEST_ID)
    return request_id or new_request_id()


async def read_body(
    scope: Scope,
    receive: Receive,
    limit: int,
    check: Callable[[bytes], None] | None = None,
    setting: str = "max_request_size",
) -> bytes:
    """Read a complete body, decompressed by its Content-Encoding.

    After a decompression, the scope's headers describe the decompressed body.

    Args:
        scope: The scope of the request.
        receive: Its `receive`.
        limit: The largest size, both compressed and decompressed.
        check: A function for each part, which may raise PayloadTooLarge.
        setting: The name of the setting that has the limit, for the error.

    Raises:
        BadRequest: The body cannot be decompressed.
        ClientGone: The client has left.
        NoRoom: The budget has no room for the body.
        PayloadTooLarge: The body exceeds the limit; this is raised as early as possible.
        UnsupportedEncoding: The Content-Encoding is unknown.
    """
    content_length, expects_continue, codings = _body_headers(scope["headers"])
    if content_length > limit:
        raise _too_large(limit, setting, more=not expects_continue)
    window = window_of(codings, more=not expects_continue) if codings else None
    if window is not None:
        receive = decompress(receive, window).__anext__
    counted: CountedBytes | None = scope.get(COUNTED_BYTES)
    parts: list[bytes] = []
    size, more = 0, True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        more = message.get("more_body", False)
        part: bytes = message.get("body", b"")
        parts.append(part)
        size += len(part)
        if len(parts) > MAX_PIECES:
            parts = [b"".join(parts)]
        try:
            if max(size, message.get(COMPRESSED, 0)) > limit:
                raise _too_large(limit, setting)
            if check is not None:
                check(part)
            if counted is not None:
                counted.grow_to(size)
        except (PayloadTooLarge, NoRoom) as error:
            error.more = message.get(SENDER_MORE, more)
            parts.clear()  # frees the memory while the remaining body is dropped
            if counted is not None:
                counted.give_back()
            raise
    if codings:
        scope.update(without_headers(scope, (b"content-encoding", b"content-length")))
        scope["headers"].append((b"content-length", b"%d" % size))
        scope[HEADER_NAMES].append(b"Content-Length")
    return parts[0] if len(parts) == 1 else b"".join(parts)


def with_body(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that returns a body, and then the messages of `receive`."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive_body() -> Message:
        return messages.pop() if messages else await receive()

    return receive_body


async def never() -> Message:
    """Wait until the request is cancelled, which is how its client leaves."""
    message: Message = await asyncio.get_running_loop().create_future()
    return message


async def discard(receive: Receive) -> None:
    """Discard the remaining body up to a limit, so that the client can read the refusal."""
    unread = MAX_DISCARDED_BYTES
    while unread > 0:
        message = await receive()
        if message["type"] == "http.disconnect" or not message.get("more_body", False):
            return
        unread -= len(message.get("body", b""))


def unread_body_of(error: TsxError, receive: Receive) -> Receive | None:
    """Return the `receive` of a refused body's unread part, or None if all of it was read."""
    return receive if error.more else None


def _body_headers(headers: list[Pair]) -> tuple[int, bool, bytes]:
    """Return the headers that describe the body.

    Returns:
        The length (0 if unknown), whether the client waits for "100 Continue", and the encodings.
    """
    length, expects_continue, codings = 0, False, b""
    for name, value in headers:
        if name == b"content-length":
            length = int(value) if value.isdigit() and len(value) <= MAX_LENGTH_DIGITS else 0
        elif name == b"expect":
            expects_continue = value.lower() == b"100-continue"
        elif name == b"content-encoding":
            codings += b"," + value
    return length, expects_continue, codings


def _too_large(limit: int, setting: str, *, more: bool = False) -> PayloadTooLarge:
    text = f"The request's body is larger than {setting}, which is {limit} bytes."
    return PayloadTooLarge(
        f"{text} Send less, or start the server with a larger {setting}.", more=more
    )


async def send_whole(
    send: Send,
    scope: Scope,
    status: int,
    headers: tuple[Pair, ...],
    request_id: bytes,
    body: bytes,
    unread: Receive | None = None,
) -> None:
    """Send a complete response.

    A HEAD request gets only the headers; 204, 205 and 304 have no body by definition.

    Args:
        send: The `send` of the request.
        scope: The scope of the request.
        status: The status.
        headers: The headers, without length and request id.
        request_id: The id of the request.
        body: The body of the response.
        unread: The `receive` of the request's remaining body, which is discarded.
    """
    pairs = [(b"x-request-id", request_id), *headers]
    if status in (204, 205, 304):
        body = b""
    if status not in (204, 304):
        pairs.append((b"content-length", b"%d" % len(body)))
    await send({"type": "http.response.start", "status": status, "headers": pairs})
    await send_last(send, b"" if scope["method"] == "HEAD" else body, unread)


async def send_last(send: Send, body: bytes, unread: Receive | None) -> None:
    """Send the last part of a response, and discard the request's remaining body."""
    if unread is not None:
        await send({"type": "http.response.body", "body": body, "more_body": True})
        await discard(unread)
        body = b""
    await send({"type": "http.response.body", "body": body})


async def while_client_waits(work: Coroutine[Any, Any, ResultT], receive: Receive) -> ResultT:
    """Return the result of a coroutine, which is cancelled if the client leaves first.

    Call this only after the body was read, because `receive` then waits for the disconnect.

    Raises:
        ClientGone: The client has left.
    """
    task = asyncio.ensure_future(work)
    client_left = asyncio.ensure_future(receive())
    try:
        await asyncio.wait([task, client_left], return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        task.cancel()
        client_left.cancel()
        await asyncio.gather(task, client_left, return_exceptions=True)


class PlatformHook(Protocol):
    """An ASGI application of a hosting platform that chooses the requests that it handles.

    In both lanes it is tried before the server's own routes.
    """

    def wants(self, path: bytes, headers: list[Pair]) -> bool:
        """Tell whether to handle a request; only the path and headers are known yet.

        Args:
            path: The path, percent-encoded and without its query.
            headers: The headers with names in lower case.
        """

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None: ...


def raw_path(scope: Scope) -> bytes:
    """Return the percent-encoded path, as it was sent if the server reports that."""
    path: bytes | None = scope.get("raw_path")
    return quote(scope["path"]).encode() if path is None else path


def cased_headers(scope: Scope) -> list[Pair]:
    """Return the headers with the original case of their names, if the server reports it.

    Handlers for TorchServe rely on the original case.
    """
    headers: list[Pair] = scope["headers"]
    names: list[bytes] = scope.get(HEADER_NAMES, ())
    if len(names) != len(headers):
        return headers
    return [(name, value) for name, (_, value) in zip(names, headers, strict=True)]


def without_headers(scope: Scope, hidden_names: Collection[bytes]) -> Scope:
    """Return the scope with the headers that `shown_headers` keeps."""
    visible_headers = shown_headers(cased_headers(scope), hidden_names)
    return {
        **scope,
        "headers": [(name.lower(), value) for name, value in visible_headers],
        HEADER_NAMES: [name for name, _ in visible_headers],
    }
