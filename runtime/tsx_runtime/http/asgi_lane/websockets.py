"""WebSocket: each message of a client is one request, and goes the way of a request over HTTP to
the same path.

    client   a text or binary message: the body of a request
    server   binary messages: the answer, a message for each part of a stream, or for each event of server-sent events
             a text message: the answer's end, JSON: {"done": true, "status": 200, "request_id":
             ..., "headers": {...}}

Errors are ends as well, with the error JSON in `error`. Requests are answered one after the other.
The token and all other headers are those of the handshake; a page, which cannot set any, offers the
subprotocols `tsx.v1` and `tsx.token.TOKEN`.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Iterator
from typing import Any
from urllib.parse import unquote_to_bytes

from tsx_runtime.api import errors
from tsx_runtime.api.access_log import ENDED
from tsx_runtime.api.headers import NO_CACHE, Pair
from tsx_runtime.api.messages import (
    CLIENT_LEFT,
    HEADER_NAMES,
    Message,
    Receive,
    Scope,
    Send,
    as_sent,
    request_id_of,
)
from tsx_runtime.api.urls import find_target, resolve, runs_model
from tsx_runtime.errors import ResourceNotFound, TsxError
from tsx_runtime.http.asgi_lane.idempotency import App
from tsx_runtime.http.asgi_lane.predictions import Predictions
from tsx_runtime.http.asgi_lane.workflow_predictions import runs_workflow

TOKEN = b"tsx.token."
JSON_BRACKETS = (("{", "}"), ("[", "]"))
LONGEST_ERROR = 64 << 10  # bytes of an error JSON that becomes part of the end
INTERRUPTED = {
    "code": 500,
    "type": "InternalServerException",
    "message": "The answer was interrupted; the server's log says why.",
}
_NOT_OF_MESSAGES = (b"connection", b"upgrade", b"content-length", b"sec-websocket-")
_NOT_TOLD = {
    b"x-request-id",
    b"content-length",
    b"connection",
    *(name for name, _ in NO_CACHE),
}  # of an answer


async def converse(
    app: App,
    admit: Callable[[Scope, Send], Awaitable[Send]],
    predictions: Predictions,
    scope: Scope,
    receive: Receive,
    send: Send,
) -> None:
    """`admit` raises `TsxError` for a client that `app` would not answer, or returns the `send` for
    a refusal.
    """
    request, send_refusal = _as_request(scope), send
    try:
        send_refusal = await admit(request, send)
        check(predictions, request)
    except TsxError as error:
        status, headers, body = errors.fault(error, scope["path"])
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


def check(predictions: Predictions, scope: Scope) -> None:
    """Whether messages to this path may run a model or a workflow: raises `TsxError` where not.

    `scope` is that of a request.
    """
    path: str = scope["path"]
    if not runs_model(path) and not runs_workflow(path):
        raise ResourceNotFound(
            f"{errors.NOT_FOUND} A WebSocket takes the paths of predictions, such as"
            " /predictions/MODEL."
        )
    if predictions.guard is not None:
        predictions.guard.check_socket(scope["headers"])
    target = find_target(path, scope["query_string"])
    if target is not None and target.name is not None:
        resolve(predictions.registry, target)


def _as_request(scope: Scope) -> Scope:
    """The scope of a request that a message makes."""
    sent = [
        (name, value)
        for name, value in as_sent(scope)
        if not name.lower().startswith(_NOT_OF_MESSAGES)
    ]
    offered = [
        each.strip()
        for name, value in scope["headers"]
        if name == b"sec-websocket-protocol"
        for each in value.split(b",")
    ]
    token = next((each[len(TOKEN) :] for each in offered if each.startswith(TOKEN)), None)
    if token is not None and not any(name.lower() == b"authorization" for name, _ in sent):
        sent.append(
            (b"Authorization", b" ".join([b"Bearer", *unquote_to_bytes(token).split()]))
        )  # without line ends
    return _with_headers({**scope, "type": "http", "method": "POST"}, sent)


def _with_headers(scope: Scope, sent: list[Pair]) -> Scope:
    return {
        **scope,
        "headers": [(name.lower(), value) for name, value in sent],
        HEADER_NAMES: [name for name, _ in sent],
    }


async def _answer(app: App, request: Scope, message: Message, send: Send) -> None:
    text, left = message.get("text"), request[CLIENT_LEFT]
    bodies = [message["bytes"] if text is None else text.encode()]
    if (kind := _content_type(text)) and not any(
        name == b"content-type" for name, _ in request["headers"]
    ):
        request = _with_headers(request, [*as_sent(request), (b"Content-Type", kind)])

    async def receive() -> Message:
        if bodies:
            return {"type": "http.request", "body": bodies.pop(), "more_body": False}
        await left.wait()
        return {"type": "http.disconnect"}

    answer = SocketAnswer(request, send)
    await app(request, receive, answer.send)
    if not answer.ended:
        await answer.end(500, INTERRUPTED)


def _content_type(text: str | None) -> bytes:
    """Of a message: by its form, since only the model's worker parses it."""
    if text is None:
        return b""
    stripped = text.strip()
    is_json = (stripped[:1], stripped[-1:]) in JSON_BRACKETS
    return b"application/json" if is_json else b"text/plain; charset=utf-8"


class SocketAnswer:
    """One answer over HTTP, as messages of a WebSocket."""

    def __init__(self, request: Scope, send: Send) -> None:
        self._request, self._send = request, send
        self._status = 0
        self._headers: list[Pair] = []
        self._events: EventData | None = None  # of an answer that is server-sent events
        self._kept: bytes | None = None  # what has come of an error JSON
        self.ended = False

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._status, self._headers = message["status"], list(message["headers"])
            kind = next((value for name, value in self._headers if name == b"content-type"), b"")
            self._events = EventData() if kind.startswith(b"text/event-stream") else None
            self._kept = (
                b"" if self._status >= 400 and kind.startswith(b"application/json") else None
            )
            return
        body, more = bytes(message.get("body", b"")), message.get("more_body", False)
        if self._kept is not None and len(self._kept) + len(body) <= LONGEST_ERROR:
            self._kept += body
        else:
            body, self._kept = (self._kept or b"") + body, None
            end = b"" if more else b"\n\n"  # which many handlers leave out
            parts = (
                [part for part in [body] if part]
                if self._events is None
                else list(self._events.feed(body + end))
            )
            if (
                parts and ENDED in self._request
            ):  # the last event is the error that interrupted the answer
                self._status, self._kept = 500, parts.pop()
            for part in parts:
                await self._give({"type": "websocket.send", "bytes": part})
        if not more:
            await self.end(self._status, None if self._kept is None else _parsed(self._kept))

    async def end(self, status: int, error: Any = None) -> None:
        self.ended = True
        shown = {
            name.decode("latin-1"): value.decode("latin-1")
            for name, value in self._headers
            if name not in _NOT_TOLD
        }
        request_id = next(
            (value.decode("latin-1") for name, value in self._headers if name == b"x-request-id"),
            None,
        )
        end = {"done": True, "status": status, "request_id": request_id, "headers": shown} | (
            {} if error is None else {"error": error}
        )
        await self._give({"type": "websocket.send", "text": json.dumps(end, ensure_ascii=False)})

    async def _give(self, message: Message) -> None:
        try:
            await self._send(message)
        except OSError:  # the client has left
            self._request[CLIENT_LEFT].set()


class EventData:
    """The data of server-sent events
    (https://html.spec.whatwg.org/multipage/server-sent-events.html), out of pieces of their text.
    """

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, piece: bytes) -> Iterator[bytes]:
        *events, self._rest = (self._rest + piece).replace(b"\r\n", b"\n").split(b"\n\n")
        for event in events:
            lines = [
                line[5:].removeprefix(b" ")
                for line in event.split(b"\n")
                if line.startswith(b"data:")
            ]
            if lines and lines != [b"[DONE]"]:  # OpenAI's word for the end
                yield b"\n".join(lines)


def _parsed(body: bytes) -> Any:
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        return body.decode(errors="replace")
    return (
        value["error"]
        if isinstance(value, dict) and isinstance(value.get("error"), dict)
        else value
    )
