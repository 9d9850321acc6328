"""The span of a request of HTTP, on both lanes; what lies below it is in `core/telemetry/tracing.py`."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from tsx_runtime.api.headers import Pair
from tsx_runtime.core.telemetry.tracing import OpenSpan, Passage, Tracer, current, parent_of
from tsx_runtime.errors import TsxError, is_failure
from tsx_runtime.http.fast_lane.exchange import Exchange
from tsx_runtime.http.fast_lane.heads import Head
from tsx_runtime.http.semantics.access_log import BROKEN, LEFT, LoggedExchange
from tsx_runtime.http.semantics.messages import Message, Receive, Scope, Send
from tsx_runtime.wire import Body, Buffer

if TYPE_CHECKING:
    from tsx_runtime.http.fast_lane.protocol import FastLane

_ROUTES = {"predictions": "/predictions/{model}", "explanations": "/explanations/{model}", "wfpredict": "/wfpredict/{workflow}"}
_LAST = {"invoke": "/models/{model}/invoke", "infer": "/v2/models/{model}/infer", "explain": "/v2/models/{model}/explain"}

App = Callable[[Scope, Receive, Send], Awaitable[None]]


def route_of(path: str) -> str:
    """A path without what is in it of one request or one model: OpenTelemetry wants few names."""
    segments = path.rstrip("/").split("/")
    first, last = segments[1] if len(segments) > 1 else "", segments[-1]
    if first in _ROUTES:
        return _ROUTES[first]
    if first == "v1":
        return f"/v1/models/{{model}}:{'explain' if path.endswith(':explain') else 'predict'}"
    if first in ("v2", "models") and last in _LAST:
        return _LAST[last]
    return "/invocations" if first == "invocations" else "/{model}/predict"


def describe(span: OpenSpan, method: str, path: str, scheme: str, version: str, client: Any, headers: list[Pair]) -> None:
    """By OpenTelemetry's names. `client` is (host, port), or None at a unix socket."""
    route = route_of(path)
    span.name = f"{method} {route}"
    span.attributes |= {
        "http.request.method": method,
        "http.route": route,
        "url.path": path,
        "url.scheme": scheme,
        "network.protocol.version": version,
    }
    if client:
        span.attributes |= {"client.address": client[0], "client.port": client[1]}
    agent = next((value for name, value in headers if name == b"user-agent"), None)
    if agent is not None:
        span.attributes["user_agent.original"] = agent.decode("latin-1")


async def traced(tracer: Tracer | None, app: App, scope: Scope, receive: Receive, send: Send) -> None:
    """The app's answer, below a span of its own where the request is traced."""
    parent = None if tracer is None else parent_of(scope["headers"])
    if tracer is None or not tracer.wants(parent):
        if tracer is not None:
            current.set(None)  # uvicorn begins a request that was sent ahead in the task of the one before
        await app(scope, receive, send)
        return
    span = tracer.begin(parent, time.monotonic())
    describe(span, scope["method"], scope["path"], scope["scheme"], scope["http_version"], scope.get("client"), scope["headers"])
    status, error, left = 0, LEFT, False

    async def heard() -> Message:
        nonlocal left
        message = await receive()
        left = left or message["type"] == "http.disconnect"
        return message

    async def watched(message: Message) -> None:
        nonlocal status, error
        if left:  # nobody is there to whom this goes
            pass
        elif message["type"] == "http.response.start":
            status, error = message["status"], BROKEN
            span.attributes["http.response.status_code"] = status
            named = next((value for name, value in message["headers"] if name == b"x-request-id"), b"")
            span.attributes["tsx.request.id"] = named.decode("latin-1")
        elif not message.get("more_body", False):
            error = f"status {status}" if is_failure(status) else ""
        await send(message)

    current.set(span)  # of the request's own task
    try:
        await app(scope, heard, watched)
    finally:
        span.finish(time.monotonic(), error)


def some_traced(tracer: Tracer, kind: Callable[..., Exchange]) -> Callable[..., Exchange]:
    """Makes exchanges of which those that are to be are traced; the others are as they would have been."""

    def make(connection: FastLane, head: Head, body: Body, arrived: float) -> Exchange:
        if tracer.wants(head.parent):
            return TracedExchange(connection, head, body, arrived, tracer)
        return kind(connection, head, body, arrived)

    return make


class TracedExchange(LoggedExchange):
    """An exchange of the fast lane that tells its spans when it is answered. Whether it has a line in the log is asked as for others."""

    def __init__(self, connection: FastLane, head: Head, body: Body, arrived: float, tracer: Tracer) -> None:
        super().__init__(connection, head, body, arrived)
        log = connection.lane.log
        self._told = log is None or not log.wants()
        self._head = head
        self._span = tracer.begin(head.parent, arrived)
        self._passage: Passage | None = Passage(self._span)
        self._ended = False
        self.meta = self._passage.into(self.meta)

    def answer(self, status: int, headers: Buffer, body: Buffer) -> None:
        streamed = self._flow is not None
        if self._passage is not None:
            self._passage.answered(self.connection.served_by(self), self.arrived, status)
            self._passage = None
        super().answer(status, headers, body)
        self._end(200 if streamed else status, BROKEN if streamed and status >= 400 else "")

    def refuse(self, error: TsxError) -> None:
        streamed = self._flow is not None
        if self._passage is not None:
            self._passage.refused(self.connection.served_by(self), self.arrived, error)
            self._passage = None
        super().refuse(error)
        self._end(200 if streamed else error.status, BROKEN if streamed else type(error).__name__ if is_failure(error.status) else "")

    def _end(self, status: int, error: str) -> None:
        if self._ended:
            return
        self._ended = True
        if self.gone:
            status, error = 0, LEFT
        error = error or (f"status {status}" if is_failure(status) else "")
        self._span.finish(time.monotonic(), error, partial(self._describe, status))

    def _describe(self, status: int) -> None:
        connection, span = self.connection, self._span
        method, path, version = (*self._head.line.split(" "), "", "")[:3]
        path = path.partition("?")[0]
        describe(span, method, path, connection.scheme or "http", version.removeprefix("HTTP/"), connection.client, self._head.headers)
        span.attributes["tsx.request.id"] = self.request_id.decode()
        if status:
            span.attributes["http.response.status_code"] = status
