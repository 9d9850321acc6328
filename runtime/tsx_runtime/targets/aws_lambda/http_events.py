"""The answering of events that are HTTP requests.

Mangum converts an event to an ASGI scope, and the answer to the service's format. Streamed answers
are converted here.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any, cast

from mangum import Mangum
from mangum.adapter import DEFAULT_TEXT_MIME_TYPES

from tsx_runtime.api import errors
from tsx_runtime.api.headers import new_request_id
from tsx_runtime.api.messages import Message, Receive, Scope, Send, never, send_whole, with_body
from tsx_runtime.api.urls import runs_model
from tsx_runtime.errors import PayloadTooLarge, PredictionFailed, TsxError, Unavailable
from tsx_runtime.shared.content_types import looks_like
from tsx_runtime.targets.aws_lambda.environment import MAX_PAYLOAD_BYTES
from tsx_runtime.targets.aws_lambda.events import UnknownEvent

TEXT_TYPES = (
    "application/problem+json",
    "application/jsonlines",
    "application/x-jsonlines",
    "application/x-ndjson",
    "application/yaml",
)
# https://docs.aws.amazon.com/lambda/latest/dg/configuration-response-streaming.html
PRELUDE_END = b"\0" * 8
# A body of this size is below the limit even as base64 or escaped JSON, including headers.
SAFE_BODY_BYTES = MAX_PAYLOAD_BYTES // 2


App = Callable[[Scope, Receive, Send], Awaitable[None]]
Write = Callable[[bytes], Awaitable[None]]


class AnswerTooLarge(PayloadTooLarge):
    """The answer exceeds Lambda's payload limit."""


class TooLate(Unavailable):
    """The function's timeout is nearly reached."""

    status = 504


class HttpEvents:
    """The adapter that answers HTTP events with an ASGI app."""

    def __init__(
        self,
        app: App,
        base_path: str,
        wait_for_model: Callable[[], Awaitable[None]],
        make_timeout_error: Callable[[], TsxError],
    ) -> None:
        """Wrap `app`.

        Args:
            app: The ASGI app.
            base_path: A prefix to remove from paths.
            wait_for_model: Waits until the model is loaded; it may raise TsxError.
            make_timeout_error: Returns the error for a timeout.
        """
        self._app = app
        self._wait_for_model = wait_for_model
        self._make_timeout_error = make_timeout_error
        self._base_path = base_path
        text = [*DEFAULT_TEXT_MIME_TYPES, *TEXT_TYPES]
        self._mangum = Mangum(
            cast("Any", app), lifespan="off", text_mime_types=text, exclude_headers=["connection"]
        )

    async def answer(self, event: dict[str, Any], context: Any, seconds: float) -> dict[str, Any]:
        """Answer an event, and return the answer in the format of the event's service."""
        handler, scope, body = self._read(event, context)
        result = _BufferedAnswer()
        try:
            await self._run(scope, with_body(body, never), result, seconds)
            if not result.has_ended:
                raise interrupted_error()
        except TsxError as error:
            result = await _error_answer(scope, error)
        answer: dict[str, Any] = handler(cast("Any", result.response()))
        if (
            len(result.body) > SAFE_BODY_BYTES
            and (size := len(json.dumps(answer))) > MAX_PAYLOAD_BYTES
        ):
            result = await _error_answer(scope, size_error(size, len(result.body)))
            answer = handler(cast("Any", result.response()))
        return answer

    async def stream(
        self, event: dict[str, Any], context: Any, seconds: float, write: Write
    ) -> None:
        """Write a prelude with status and headers, then each part of the body.

        Raises:
            TsxError: The answer was interrupted.
        """
        _, scope, body = self._read(event, context)
        parts = _StreamedAnswer(write)
        try:
            await self._run(scope, with_body(body, never), parts, seconds)
            if not parts.has_ended:
                raise interrupted_error()
        except TsxError as error:
            if parts.has_begun:
                raise
            await _send_error(scope, error, parts)

    def _read(self, event: dict[str, Any], context: Any) -> tuple[Any, Scope, bytes]:
        """Return Mangum's handler for an event, the ASGI scope, and the body.

        Raises:
            UnknownEvent: The event is not from a known service.
        """
        try:
            handler = self._mangum.infer(event, context)
            return handler, self._scope(handler.scope, event), handler.body
        except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
            text = (
                "The event looks like an HTTP request, but not like one from API Gateway, a"
                " function URL or a load balancer"
            )
            raise UnknownEvent(f"{text}: {error!r}") from error

    def _scope(self, scope: Any, event: dict[str, Any]) -> Scope:
        """Set `root_path` to the base path or the API's stage, if the path begins with it."""
        scope["headers"] = [(name, value) for name, value in scope["headers"]]
        stage = event["requestContext"].get("stage")
        for root in (self._base_path, f"/{stage}" if stage and stage != "$default" else ""):
            if root and scope["path"].startswith(f"{root}/"):
                scope["root_path"] = root
                break
        return cast("Scope", scope)

    async def _run(self, scope: Scope, receive: Receive, send: Send, seconds: float) -> None:
        try:
            await asyncio.wait_for(self._with_model(scope, receive, send), max(0.0, seconds))
        except asyncio.TimeoutError:
            raise self._make_timeout_error() from None

    async def _with_model(self, scope: Scope, receive: Receive, send: Send) -> None:
        if runs_model(scope["path"].removeprefix(scope["root_path"])):
            await self._wait_for_model()
        await self._app(scope, receive, send)


class _BufferedAnswer:
    """A `send` that collects the answer in memory."""

    def __init__(self) -> None:
        self.status = 500
        self.headers: list[tuple[bytes, bytes]] = []
        self.body = b""
        self.has_ended = False
        self._parts: list[bytes] = []

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status, self.headers = message["status"], message["headers"]
        else:
            self._parts.append(message.get("body", b""))
            if not message.get("more_body", False):
                self.body, self.has_ended = b"".join(self._parts), True

    def response(self) -> dict[str, Any]:
        """Return the answer for Mangum; a missing content type is guessed from the body.

        Without a content type, AWS's services assume JSON, and Mangum assumes binary data.
        """
        if not any(name == b"content-type" for name, _ in self.headers):
            self.headers = [*self.headers, (b"content-type", looks_like(self.body).encode())]
        return {"status": self.status, "headers": self.headers, "body": self.body}


class _StreamedAnswer:
    """A `send` that writes each part of the answer at once."""

    def __init__(self, write: Write) -> None:
        self.has_begun = self.has_ended = False
        self._write = write

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.has_begun = True
            await self._write(prelude(message["status"], message["headers"]))
            return
        if message.get("body"):
            await self._write(message["body"])
        self.has_ended = not message.get("more_body", False)


def prelude(status: int, headers: list[tuple[bytes, bytes]]) -> bytes:
    """Return the status and headers of a streamed answer in Lambda's format."""
    fields: dict[str, str] = {}
    cookies: list[str] = []
    for header_name, value in headers:
        name, text = header_name.decode("latin-1"), value.decode("latin-1")
        if name == "set-cookie":
            cookies.append(text)
        elif name not in ("content-length", "connection"):
            fields[name] = f"{fields[name]}, {text}" if name in fields else text
    head = {"statusCode": status, "headers": fields, **({"cookies": cookies} if cookies else {})}
    return json.dumps(head).encode() + PRELUDE_END


def timeout_error() -> TooLate:
    """Return the error for a request that was not answered in time."""
    return TooLate(
        "The answer was not ready within the function's timeout. Raise the timeout or the memory."
    )


def interrupted_error() -> PredictionFailed:
    """Return the error for an answer that was interrupted."""
    return PredictionFailed(
        "The answer was interrupted because the handler failed; see the function's log."
    )


def size_error(size: int, body: int) -> AnswerTooLarge:
    """Return the error for an answer that exceeds Lambda's limit."""
    return AnswerTooLarge(
        f"The answer has {body} bytes, {size} as sent through Lambda, whose limit is"
        f" {MAX_PAYLOAD_BYTES} (6 MB; 4.5 MB of binary data in base64). Return a smaller answer, or"
        " store it in S3 and return its URL; a function URL that streams (TSX_LAMBDA_ANSWERS=streamed)"
        " carries 200 MB."
    )


async def _error_answer(scope: Scope, error: TsxError) -> _BufferedAnswer:
    answer = _BufferedAnswer()
    await _send_error(scope, error, answer)
    return answer


async def _send_error(scope: Scope, error: TsxError, send: Send) -> None:
    status, headers, body = errors.error_response(error, scope["path"])
    await send_whole(send, scope, status, headers, new_request_id(), body)
