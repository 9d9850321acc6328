"""The result of a tool call, from a model's response."""

from __future__ import annotations

import base64
import json
from collections.abc import Awaitable, Callable
from typing import Any

import mcp_types as types

from tsx_runtime.api.messages import Message
from tsx_runtime.errors import PredictionFailed

END_OF_STREAM = "[DONE]"  # the last event in OpenAI's API


class ModelResponse:
    """A model's response, which `send` collects from ASGI messages.

    Each server-sent event is reported as progress.
    """

    def __init__(self, max_bytes: int, report: Callable[..., Awaitable[None]]) -> None:
        self._max_bytes = max_bytes
        self._report = report
        self._status = 0
        self._content_type = ""
        self._size = 0
        # The body; in a stream of events, only the bytes after the last complete event.
        self._body = b""
        self._events: list[str] = []

    async def send(self, message: Message) -> None:
        """Collect a message.

        Raises:
            PredictionFailed: The parts exceed the limit.
        """
        if message["type"] == "http.response.start":
            self._status = message["status"]
            content_type = dict(message["headers"]).get(b"content-type", b"").decode("latin-1")
            self._content_type = content_type.partition(";")[0].strip().lower()
            return
        part = message.get("body", b"")
        self._size += len(part)
        if self._size > self._max_bytes:
            self._size, self._body, self._events = 0, b"", []
            raise PredictionFailed(
                f"The parts of the answer have more than {self._max_bytes} bytes together"
                " (max_response_size)."
            )
        self._body += part
        if self._content_type == "text/event-stream":
            end = b"" if message.get("more_body", False) else b"\n\n"
            await self._read_events(self._body.replace(b"\r\n", b"\n") + end)

    async def _read_events(self, text: bytes) -> None:
        *events, self._body = text.split(b"\n\n")
        for event in events:
            lines = event.decode(errors="replace").split("\n")
            data = "\n".join(line[5:].removeprefix(" ") for line in lines if line[:5] == "data:")
            if data and data != END_OF_STREAM:
                self._events.append(data)
                value = _parse(data)
                await self._report(
                    len(self._events), message=value if isinstance(value, str) else data
                )

    def result(self, *, is_complete: bool) -> types.CallToolResult:
        """Return the result; an interrupted response is an error, with what has come of it."""
        structured_content = None
        if self._content_type == "application/json" and self._status < 400:
            value = _parse(self._body)
            structured_content = value if isinstance(value, dict) else None
        content = [self._content()]
        if not is_complete:
            content.append(types.TextContent(text="The answer was interrupted."))
        return types.CallToolResult(
            content=content,
            structured_content=structured_content,
            is_error=self._status >= 400 or not is_complete,
        )

    def _content(self) -> types.ContentBlock:
        if self._content_type == "text/event-stream":
            return types.TextContent(text=_join(self._events))
        kind, data = self._content_type.partition("/")[0], base64.b64encode(self._body).decode()
        if kind == "image":
            return types.ImageContent(data=data, mime_type=self._content_type)
        if kind == "audio":
            return types.AudioContent(data=data, mime_type=self._content_type)
        try:
            return types.TextContent(text=self._body.decode())
        except UnicodeDecodeError:
            resource = types.BlobResourceContents(
                uri="tsx:answer", blob=data, mime_type=self._content_type or None
            )
            return types.EmbeddedResource(resource=resource)


def _parse(text: str | bytes) -> Any:
    """Return a JSON value, whose numbers are finite; None for other text."""
    try:
        return json.loads(text, parse_constant=lambda _: None)
    except (ValueError, RecursionError):
        return None


def _join(events: list[str]) -> str:
    """Return one text for a stream: the joined strings, or a JSON array of other values."""
    values = [_parse(event) for event in events]
    if all(isinstance(value, str) for value in values):
        return "".join(values)
    return "".join(events) if None in values else json.dumps(values, ensure_ascii=False)
