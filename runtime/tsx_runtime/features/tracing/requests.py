"""The span of an HTTP request outside of the fast lane.

`core/telemetry/tracing.py` makes its child spans.
"""

from __future__ import annotations

import time

from tsx_runtime.api.access_log import BROKEN, CLIENT_DISCONNECTED
from tsx_runtime.api.messages import App, Message, Receive, Scope, Send
from tsx_runtime.api.tracing import describe
from tsx_runtime.core.telemetry.tracing import Tracer, current, parent_of
from tsx_runtime.errors import is_failure


async def traced(tracer: Tracer, app: App, scope: Scope, receive: Receive, send: Send) -> None:
    """Run an app, inside a span if the request is traced."""
    parent = parent_of(scope["headers"])
    if not tracer.should_trace(parent):
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
