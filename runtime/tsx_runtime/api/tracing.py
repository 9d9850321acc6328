"""The span of an HTTP request in both lanes; `core/telemetry/tracing.py` has its child spans."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Any

from tsx_runtime.api import openai
from tsx_runtime.api.access_log import BROKEN, CLIENT_DISCONNECTED
from tsx_runtime.api.headers import Pair
from tsx_runtime.api.messages import Message, Receive, Scope, Send
from tsx_runtime.core.telemetry.tracing import OpenSpan, Tracer, current, parent_of
from tsx_runtime.errors import is_failure

_ROUTES = {
    "predictions": "/predictions/{model}",
    "explanations": "/explanations/{model}",
    "wfpredict": "/wfpredict/{workflow}",
}
_ROUTES_BY_VERB = {
    "invoke": "/models/{model}/invoke",
    "infer": "/v2/models/{model}/infer",
    "explain": "/v2/models/{model}/explain",
}

App = Callable[[Scope, Receive, Send], Awaitable[None]]


def route_of(path: str) -> str:
    """Return a path without model names and ids, because span names should be few."""
    if path in openai.PATHS:
        return path
    segments = path.rstrip("/").split("/")
    first, last = segments[1] if len(segments) > 1 else "", segments[-1]
    if first in _ROUTES:
        return _ROUTES[first]
    if first == "v1":
        return f"/v1/models/{{model}}:{'explain' if path.endswith(':explain') else 'predict'}"
    if first in ("v2", "models") and last in _ROUTES_BY_VERB:
        return _ROUTES_BY_VERB[last]
    return "/invocations" if first == "invocations" else "/{model}/predict"


def describe(
    span: OpenSpan,
    method: str,
    path: str,
    scheme: str,
    version: str,
    client: Any,
    headers: list[Pair],
) -> None:
    """Set a span's attributes by OpenTelemetry's names; `client` is (host, port) or None."""
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


async def traced(
    tracer: Tracer | None, app: App, scope: Scope, receive: Receive, send: Send
) -> None:
    """Run an app, inside a span if the request is traced."""
    parent = None if tracer is None else parent_of(scope["headers"])
    if tracer is None or not tracer.should_trace(parent):
        if tracer is not None:
            # uvicorn may run this in the task of a traced request that was pipelined before it.
            current.set(None)
        await app(scope, receive, send)
        return
    span = tracer.begin(parent, time.monotonic())
    describe(
        span,
        scope["method"],
        scope["path"],
        scope["scheme"],
        scope["http_version"],
        scope.get("client"),
        scope["headers"],
    )
    status, error, has_left = 0, CLIENT_DISCONNECTED, False

    async def traced_receive() -> Message:
        nonlocal has_left
        message = await receive()
        has_left = has_left or message["type"] == "http.disconnect"
        return message

    async def traced_send(message: Message) -> None:
        nonlocal status, error
        if has_left:  # The client does not receive this message.
            pass
        elif message["type"] == "http.response.start":
            status, error = message["status"], BROKEN
            span.attributes["http.response.status_code"] = status
            request_id = next(
                (value for name, value in message["headers"] if name == b"x-request-id"), b""
            )
            span.attributes["tsx.request.id"] = request_id.decode("latin-1")
        elif not message.get("more_body", False):
            error = f"status {status}" if is_failure(status) else ""
        await send(message)

    current.set(span)  # set only in the context of the request's task
    try:
        await app(scope, traced_receive, traced_send)
    finally:
        span.finish(time.monotonic(), error)
