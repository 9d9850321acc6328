"""Predictions over a WebSocket: each message is handled like an HTTP request to the same path.

    client   a text or binary message: the body of a request
    server   binary messages: the response; one for each part of a stream, or each server-sent event
             a text message: the end of the response as JSON, {"done": true, "status": 200,
             "request_id": ..., "headers": {...}}

A response that fails ends with the same JSON, whose `error` has the error. Requests are answered
one after the other. Each request has the headers of the handshake, including its token. A web page
cannot set headers, so it offers the subprotocols `tsx.v1` and `tsx.token.TOKEN`.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Iterator
from typing import Any
from urllib.parse import unquote_to_bytes

from tsx_runtime.api import errors
from tsx_runtime.api.access_log import BREAK_REASON
from tsx_runtime.api.headers import NO_CACHE, Pair
from tsx_runtime.api.messages import (
    CLIENT_LEFT,
    HEADER_NAMES,
    App,
    Message,
    Receive,
    Scope,
    Send,
    cased_headers,
    request_id_of,
    with_body,
)
from tsx_runtime.api.urls import find_target, resolve
from tsx_runtime.errors import ResourceNotFound, TsxError
from tsx_runtime.http.asgi_lane.predictions import Predictions

TOKEN_PREFIX = b"tsx.token."
JSON_BRACKETS = (("{", "}"), ("[", "]"))
MAX_ERROR_BYTES = 64 << 10  # A larger error JSON is sent as a separate message before the end.
INTERRUPTED_ERROR = {
    "code": 500,
    "type": "InternalServerException",
    "message": "The answer was interrupted; the server's log says why.",
}
# prefixes of headers that requests do not copy from the handshake
_HANDSHAKE_HEADERS = (b"connection", b"upgrade", b"content-length", b"sec-websocket-")
# headers that are not in the JSON that ends a response
_OMITTED_HEADERS = {
    b"x-request-id",
    b"content-length",
    b"connection",
    *(name for name, _ in NO_CACHE),
}


async def serve_websocket(
    app: App,
    admit: Callable[[Scope, Send], Awaitable[Send]],
    predictions: Predictions,
    runs_model: Callable[[Scope], bool],
    scope: Scope,
    receive: Receive,
    send: Send,
) -> None:
    """Check a handshake, then answer each message of the client.

    `admit` raises `TsxError` if `app` would refuse the client. Otherwise it returns the `send` for
    later refusals.
    """
    request, send_refusal = _request_scope(scope), send
    try:
        send_refusal = await admit(request, send)
        if not runs_model(request):
            raise ResourceNotFound(
                f"{errors.NOT_FOUND} A WebSocket takes the paths of predictions, such as"
                " /predictions/MODEL."
            )
        check_model(predictions, request)
    except TsxError as error:
        status, headers, body = errors.error_response(error, scope["path"])
        predictions.counts.add(status)
        pairs = [
            (b"x-request-id", request_id_of(scope)),
            *headers,
            (b"content-length", b"%d" % len(body)),
            (b"connection", b"close"),
        ]
        await send_refusal(
            {"type": "websocket.refuse", "status": status, "headers": pairs, "body": body}
        )
        return
    await send({"type": "websocket.accept"})
    while (message := await receive())["type"] == "websocket.receive":
        await _answer(app, dict(request), message, send)


def check_model(predictions: Predictions, scope: Scope) -> None:
    """Check that the client may send messages, and that their model exists.

    Raises:
        TsxError: The token or the model is wrong.
    """
    if predictions.guard is not None:
        predictions.guard.check_socket(scope["headers"])
    target = find_target(scope["path"], scope["query_string"])
    if target is not None and target.name is not None:
        resolve(predictions.registry, target)


def _request_scope(scope: Scope) -> Scope:
    """Return the scope of the requests that follow a handshake, one for each message."""
    headers = [
        (name, value)
        for name, value in cased_headers(scope)
        if not name.lower().startswith(_HANDSHAKE_HEADERS)
    ]
    protocols = [
        protocol.strip()
        for name, value in scope["headers"]
        if name == b"sec-websocket-protocol"
        for protocol in value.split(b",")
    ]
    token = next(
        (
            protocol[len(TOKEN_PREFIX) :]
            for protocol in protocols
            if protocol.startswith(TOKEN_PREFIX)
        ),
        None,
    )
    if token is not None and not any(name.lower() == b"authorization" for name, _ in headers):
        # `split` removes line ends, which would add a header.
        headers.append((b"Authorization", b" ".join([b"Bearer", *unquote_to_bytes(token).split()])))
    return _with_headers({**scope, "type": "http", "method": "POST"}, headers)


def _with_headers(scope: Scope, headers: list[Pair]) -> Scope:
    return {
        **scope,
        "headers": [(name.lower(), value) for name, value in headers],
        HEADER_NAMES: [name for name, _ in headers],
    }


async def _answer(app: App, request: Scope, message: Message, send: Send) -> None:
    text, client_left = message.get("text"), request[CLIENT_LEFT]
    body = message["bytes"] if text is None else text.encode()
    if (content_type := _content_type(text)) and not any(
        name == b"content-type" for name, _ in request["headers"]
    ):
        request = _with_headers(request, [*cased_headers(request), (b"Content-Type", content_type)])

    async def receive() -> Message:
        await client_left.wait()
        return {"type": "http.disconnect"}

    answer = SocketAnswer(request, send)
    await app(request, with_body(body, receive), answer.send)
    if not answer.has_ended:
        await answer.end(500, INTERRUPTED_ERROR)


def _content_type(text: str | None) -> bytes:
    """Guess the content type of a text by its first and last character, without parsing it."""
    if text is None:
        return b""
    trimmed = text.strip()
    is_json = (trimmed[:1], trimmed[-1:]) in JSON_BRACKETS
    return b"application/json" if is_json else b"text/plain; charset=utf-8"


class SocketAnswer:
    """An HTTP response that is sent as messages of a WebSocket."""

    def __init__(self, request: Scope, send: Send) -> None:
        self._request, self._send = request, send
        self._status = 0
        self._headers: list[Pair] = []
        self._events: EventParser | None = None  # the parser of server-sent events
        self._error_body: bytes | None = None  # the beginning of an error JSON
        self.has_ended = False

    async def send(self, message: Message) -> None:
        """Send a part of the response; the ASGI app calls this."""
        if message["type"] == "http.response.start":
            self._status, self._headers = message["status"], list(message["headers"])
            content_type = next(
                (value for name, value in self._headers if name == b"content-type"), b""
            )
            self._events = EventParser() if content_type.startswith(b"text/event-stream") else None
            self._error_body = (
                b""
                if self._status >= 400 and content_type.startswith(b"application/json")
                else None
            )
            return
        body, has_more = bytes(message.get("body", b"")), message.get("more_body", False)
        if self._error_body is not None and len(self._error_body) + len(body) <= MAX_ERROR_BYTES:
            self._error_body += body
        else:
            body, self._error_body = (self._error_body or b"") + body, None
            end = (
                b"" if has_more else b"\n\n"
            )  # Many handlers omit the empty line after the last event.
            parts = (
                [part for part in [body] if part]
                if self._events is None
                else list(self._events.feed(body + end))
            )
            # The last event is the error that interrupted the response.
            if parts and BREAK_REASON in self._request:
                self._status, self._error_body = 500, parts.pop()
            for part in parts:
                await self._send_message({"type": "websocket.send", "bytes": part})
        if not has_more:
            await self.end(
                self._status, None if self._error_body is None else _error_value(self._error_body)
            )

    async def end(self, status: int, error: Any = None) -> None:
        """Send the text message that ends the response."""
        self.has_ended = True
        header_texts = {
            name.decode("latin-1"): value.decode("latin-1")
            for name, value in self._headers
            if name not in _OMITTED_HEADERS
        }
        request_id = next(
            (value.decode("latin-1") for name, value in self._headers if name == b"x-request-id"),
            None,
        )
        end = {
            "done": True,
            "status": status,
            "request_id": request_id,
            "headers": header_texts,
        } | ({} if error is None else {"error": error})
        await self._send_message(
            {"type": "websocket.send", "text": json.dumps(end, ensure_ascii=False)}
        )

    async def _send_message(self, message: Message) -> None:
        try:
            await self._send(message)
        except OSError:  # The client has left.
            self._request[CLIENT_LEFT].set()


class EventParser:
    """A parser that extracts the data of server-sent events from a stream's pieces.

    See https://html.spec.whatwg.org/multipage/server-sent-events.html.
    """

    def __init__(self) -> None:
        self._unparsed = b""

    def feed(self, piece: bytes) -> Iterator[bytes]:
        """Parse a piece, and yield the data of each event that is complete now."""
        *events, self._unparsed = (self._unparsed + piece).replace(b"\r\n", b"\n").split(b"\n\n")
        for event in events:
            lines = [
                line[5:].removeprefix(b" ")
                for line in event.split(b"\n")
                if line.startswith(b"data:")
            ]
            if lines and lines != [b"[DONE]"]:  # OpenAI's marker for the end
                yield b"\n".join(lines)


def _error_value(body: bytes) -> Any:
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        return body.decode(errors="replace")
    return (
        value["error"]
        if isinstance(value, dict) and isinstance(value.get("error"), dict)
        else value
    )
