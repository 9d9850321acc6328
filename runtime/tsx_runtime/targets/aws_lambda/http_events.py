"""HTTP requests in events: Mangum converts each to an ASGI scope, and the answer to the platform's
format, whole or streamed.
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
from tsx_runtime.api.messages import Message, Receive, Scope, Send, send_whole
from tsx_runtime.api.urls import runs_model
from tsx_runtime.errors import PayloadTooLarge, PredictionFailed, TsxError, Unavailable
from tsx_runtime.shared.content_types import looks_like
from tsx_runtime.targets.aws_lambda.environment import LARGEST
from tsx_runtime.targets.aws_lambda.events import UnknownEvent

TEXT = (
    "application/problem+json",
    "application/jsonlines",
    "application/x-jsonlines",
    "application/x-ndjson",
    "application/yaml",
)
# https://docs.aws.amazon.com/lambda/latest/dg/configuration-response-streaming.html
PRELUDE_END = b"\0" * 8
# Bytes of a body that base64 or JSON's escapes do not make too large, headers included.
SURELY_FITS = LARGEST // 2


App = Callable[[Scope, Receive, Send], Awaitable[None]]
Write = Callable[[bytes], Awaitable[None]]


class AnswerTooLarge(PayloadTooLarge):
    """The answer exceeds Lambda's payload limit."""


class TooLate(Unavailable):
    """The function's timeout is nearly over."""

    status = 504


class Http:
    """The app behind HTTP events.

    `wait` returns once the model is loaded, or raises TsxError; `late` gives the error of a
    timeout.
    """

    def __init__(
        self,
        app: App,
        base_path: str,
        wait: Callable[[], Awaitable[None]],
        late: Callable[[], TsxError],
    ) -> None:
        self._app = app
        self._wait = wait
        self._late = late
        self._base_path = base_path
        text = [*DEFAULT_TEXT_MIME_TYPES, *TEXT]
        self._mangum = Mangum(
            cast("Any", app), lifespan="off", text_mime_types=text, exclude_headers=["connection"]
        )

    async def answer(self, event: dict[str, Any], context: Any, seconds: float) -> dict[str, Any]:
        """The answer in the form of the event's service."""
        handler, scope, body = self._read(event, context)
        whole = _BufferedAnswer()
        try:
            await self._run(scope, _RequestBody(body), whole, seconds)
            if not whole.ended:
                raise broken_off()
        except TsxError as error:
            whole = await _refused(scope, error)
        answer: dict[str, Any] = handler(cast("Any", whole.response()))
        if len(whole.body) > SURELY_FITS and (size := len(json.dumps(answer))) > LARGEST:
            whole = await _refused(scope, too_large(size, len(whole.body)))
            answer = handler(cast("Any", whole.response()))
        return answer

    async def stream(
        self, event: dict[str, Any], context: Any, seconds: float, write: Write
    ) -> None:
        """As a prelude with status and headers, then the body as it comes.

        Raises TsxError where it breaks off.
        """
        _, scope, body = self._read(event, context)
        parts = _StreamedAnswer(write)
        try:
            await self._run(scope, _RequestBody(body), parts, seconds)
            if not parts.ended:
                raise broken_off()
        except TsxError as error:
            if parts.begun:
                raise
            await _refuse(scope, error, parts)

    def _read(self, event: dict[str, Any], context: Any) -> tuple[Any, Scope, bytes]:
        """Raises UnknownEvent."""
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
        """The base path, or the stage of an API, is cut off the beginning of the path."""
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
            raise self._late() from None

    async def _with_model(self, scope: Scope, receive: Receive, send: Send) -> None:
        if runs_model(scope["path"].removeprefix(scope["root_path"])):
            await self._wait()
        await self._app(scope, receive, send)


class _RequestBody:
    """The request, then nothing: a wait for the client's disconnect lasts until it is cancelled."""

    def __init__(self, body: bytes) -> None:
        self._body: bytes | None = body

    async def __call__(self) -> Message:
        body, self._body = self._body, None
        if body is None:
            await asyncio.get_running_loop().create_future()
        return {"type": "http.request", "body": body, "more_body": False}


class _BufferedAnswer:
    """An answer collected in memory."""

    def __init__(self) -> None:
        self.status = 500
        self.headers: list[tuple[bytes, bytes]] = []
        self.body = b""
        self.ended = False
        self._parts: list[bytes] = []

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status, self.headers = message["status"], message["headers"]
        else:
            self._parts.append(message.get("body", b""))
            if not message.get("more_body", False):
                self.body, self.ended = b"".join(self._parts), True

    def response(self) -> dict[str, Any]:
        """Without a content type Lambda's services assume JSON and Mangum binary; here the body
        decides.
        """
        if not any(name == b"content-type" for name, _ in self.headers):
            self.headers = [*self.headers, (b"content-type", looks_like(self.body).encode())]
        return {"status": self.status, "headers": self.headers, "body": self.body}


class _StreamedAnswer:
    """An answer sent as it is produced."""

    def __init__(self, write: Write) -> None:
        self.begun = self.ended = False
        self._write = write

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.begun = True
            await self._write(prelude(message["status"], message["headers"]))
            return
        if message.get("body"):
            await self._write(message["body"])
        self.ended = not message.get("more_body", False)


def prelude(status: int, headers: list[tuple[bytes, bytes]]) -> bytes:
    """The status and headers of a streamed answer, as Lambda expects them before its body."""
    named: dict[str, str] = {}
    cookies: list[str] = []
    for raw, value in headers:
        name, text = raw.decode("latin-1"), value.decode("latin-1")
        if name == "set-cookie":
            cookies.append(text)
        elif name not in ("content-length", "connection"):
            named[name] = f"{named[name]}, {text}" if name in named else text
    head = {"statusCode": status, "headers": named, **({"cookies": cookies} if cookies else {})}
    return json.dumps(head).encode() + PRELUDE_END


def too_late() -> TooLate:
    return TooLate(
        "The answer was not ready within the function's timeout. Raise the timeout or the memory."
    )


def broken_off() -> PredictionFailed:
    return PredictionFailed(
        "The answer was interrupted because the handler failed; see the function's log."
    )


def too_large(size: int, body: int) -> AnswerTooLarge:
    return AnswerTooLarge(
        f"The answer has {body} bytes, {size} as sent through Lambda, whose limit is {LARGEST} (6"
        " MB; 4.5 MB of binary data in base64). Return a smaller answer, or store it in S3 and"
        " return its URL; a function URL that streams (TSX_LAMBDA_ANSWERS=streamed) carries"
        " 200 MB."
    )


async def _refused(scope: Scope, error: TsxError) -> _BufferedAnswer:
    whole = _BufferedAnswer()
    await _refuse(scope, error, whole)
    return whole


async def _refuse(scope: Scope, error: TsxError, send: Send) -> None:
    status, headers, body = errors.fault(error, scope["path"])
    await send_whole(send, scope, status, headers, new_request_id(), body)
