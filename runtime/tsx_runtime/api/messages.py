"""Reads a request's body and writes an answer directly on ASGI, without a framework."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Coroutine, MutableMapping
from typing import Any, Protocol, TypeAlias, TypeVar
from urllib.parse import quote

from tsx_runtime.api.encodings import COMPRESSED, SENDER_MORE, decompress, window_of
from tsx_runtime.api.headers import Pair, new_request_id, shown_headers
from tsx_runtime.core.scheduling.byte_budget import MAX_UNCOUNTED_BYTES, ByteBudget
from tsx_runtime.errors import NoRoom, PayloadTooLarge, TsxError

MAX_HEADERS = 200  # of one request
MAX_MANAGEMENT_BODY = 1 << 20  # bytes
HEADER_NAMES = "tsx.header_names"  # in the scope: the names of its headers, in their order
Scope: TypeAlias = MutableMapping[str, Any]
Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]
ResultT = TypeVar("ResultT")

MOST_PIECES = 1024  # of one body, which a client may send byte by byte
LONGEST_NUMBER = 19  # digits of a length
COUNTED = "tsx.counted"  # in a scope: its `CountedBytes`
CLIENT_LEFT = "tsx.client_left"  # in the scope of a WebSocket: the event that its client has left
REQUEST_ID = "tsx.request_id"  # in a scope: the id that a proxy has given the request already
DISCARD = (
    64 << 20
    # bytes of a refused body that are read and thrown away, so that its sender comes to read the
    # refusal
)


class ClientGone(Exception):
    """The client closed the connection before its request was complete."""


class CountedBytes:
    """What the body of one request has taken of the server's budget, until the request ends."""

    __slots__ = ("_budget", "_size")

    def __init__(self, budget: ByteBudget) -> None:
        self._budget = budget
        self._size = 0

    def grow_to(self, size: int) -> None:
        """Raises NoRoom."""
        if size > MAX_UNCOUNTED_BYTES:
            self._budget.take(size - self._size)
            self._size = size

    def shrink_to(self, size: int) -> None:
        """Count no more than this."""
        kept = min(self._size, size) if size > MAX_UNCOUNTED_BYTES else 0
        self._budget.give(self._size - kept)
        self._size = kept

    def give_back(self) -> None:
        self.shrink_to(0)


def request_id_of(scope: Scope) -> bytes:
    given: bytes | None = scope.get(REQUEST_ID)
    return given or new_request_id()


async def read_body(
    scope: Scope,
    receive: Receive,
    limit: int,
    check: Callable[[bytes], None] | None = None,
    setting: str = "max_request_size",
) -> bytes:
    """The whole body; raises `PayloadTooLarge` as soon as it is known to exceed `limit` bytes,
    `NoRoom`, and `ClientGone`.

    A body with a Content-Encoding is decompressed, and the scope's headers become those of the
    result; `limit` bounds both forms. Raises `UnsupportedEncoding`, and `BadRequest` for a broken
    body. `check` is called with each part, and may raise `PayloadTooLarge`. `setting`: the one that
    `limit` comes from.
    """
    announced, waits_for_go, codings = _announced(scope["headers"])
    if announced > limit:
        raise _too_large(limit, setting, more=not waits_for_go)
    window = window_of(codings, more=not waits_for_go) if codings else None
    if window is not None:
        receive = decompress(receive, window).__anext__
    counted: CountedBytes | None = scope.get(COUNTED)
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
        if len(parts) > MOST_PIECES:
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
            parts.clear()  # not held while the rest of it is thrown away
            if counted is not None:
                counted.give_back()
            raise
    if codings:
        scope.update(without_headers(scope, (b"content-encoding", b"content-length")))
        scope["headers"].append((b"content-length", b"%d" % size))
        scope[HEADER_NAMES].append(b"Content-Length")
    return parts[0] if len(parts) == 1 else b"".join(parts)


async def discard(receive: Receive) -> None:
    """Read the rest of a refused body: a connection closed under a sender would lose it the
    refusal. Not without end.
    """
    rest = DISCARD
    while rest > 0:
        message = await receive()
        if message["type"] == "http.disconnect" or not message.get("more_body", False):
            return
        rest -= len(message.get("body", b""))


def rest_of(error: TsxError, receive: Receive) -> Receive | None:
    """Where what is left of a refused body comes from, if there is any."""
    return receive if error.more else None


def _announced(headers: list[Pair]) -> tuple[int, bool, bytes]:
    """What the headers say of the body: its length (0 where unknown), whether the sender waits for
    a go-ahead, and its encodings.
    """
    length, waits, codings = 0, False, b""
    for name, value in headers:
        if name == b"content-length":
            length = int(value) if value.isdigit() and len(value) <= LONGEST_NUMBER else 0
        elif name == b"expect":
            waits = value.lower() == b"100-continue"
        elif name == b"content-encoding":
            codings += b"," + value
    return length, waits, codings


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
    rest: Receive | None = None,
) -> None:
    """One complete answer.

    A HEAD request gets its headers alone; 204, 205 and 304 have no body by definition.

    With `rest`, it goes out while the request's body is still coming from there, of which the rest
    is thrown away.
    """
    pairs = [(b"x-request-id", request_id), *headers]
    if status in (204, 205, 304):
        body = b""
    if status not in (204, 304):
        pairs.append((b"content-length", b"%d" % len(body)))
    await send({"type": "http.response.start", "status": status, "headers": pairs})
    await send_last(send, b"" if scope["method"] == "HEAD" else body, rest)


async def send_last(send: Send, body: bytes, rest: Receive | None) -> None:
    if rest is not None:
        await send({"type": "http.response.body", "body": body, "more_body": True})
        await discard(rest)
        body = b""
    await send({"type": "http.response.body", "body": body})


async def while_client_waits(work: Coroutine[Any, Any, ResultT], receive: Receive) -> ResultT:
    """Raises ClientGone, and ends the work, when the client leaves first.

    After the body, nothing else is to be received.
    """
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(receive())
    try:
        await asyncio.wait([working, leaving], return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGone
        return working.result()
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


class PlatformHook(Protocol):
    """What a hosting platform asks for in its own way: an ASGI application that decides itself
    which requests it takes.

    It comes before the server's own routes, on both lanes.
    """

    def wants(self, path: bytes, headers: list[Pair]) -> bool:
        """`path` is percent-encoded, without its query; names of headers are in lower case.

        The answer depends on nothing else.
        """

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None: ...


def raw_path(scope: Scope) -> bytes:
    """The path as it was sent, as far as the server reports it."""
    path: bytes | None = scope.get("raw_path")
    return quote(scope["path"]).encode() if path is None else path


def as_sent(scope: Scope) -> list[Pair]:
    """The request's headers under the client's own names, which TorchServe's handlers look up,
    where the server tells them.
    """
    headers: list[Pair] = scope["headers"]
    names: list[bytes] = scope.get(HEADER_NAMES, ())
    if len(names) != len(headers):
        return headers
    return [(name, value) for name, (_, value) in zip(names, headers, strict=True)]


def without_headers(scope: Scope, left_out: Collection[bytes]) -> Scope:
    """Return the scope with the headers that `shown_headers` leaves."""
    shown = shown_headers(as_sent(scope), left_out)
    return {
        **scope,
        "headers": [(name.lower(), value) for name, value in shown],
        HEADER_NAMES: [name for name, _ in shown],
    }
