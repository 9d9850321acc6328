"""The access log, with a line for each HTTP and gRPC response.

A line is `/127.0.0.1:64003 "POST /predictions/resnet-18 HTTP/1.1" 200 118`.
"""

from __future__ import annotations

import asyncio
import math
import random
import re
import time
from typing import Any

from tsx_runtime.api.messages import Message, Scope, Send
from tsx_runtime.settings.schema import Settings
from tsx_runtime.shared.line_log import (
    ACCESS_LOG,
    FLUSH_INTERVAL_S,
    MAX_BATCH_LINES,
    Logbook,
    stamp,
)
from tsx_runtime.shared.log_format import escaped, json_line, writes_json
from tsx_runtime.shared.redaction import redacted

MAX_NAME_CHARS = 128  # characters of a model's name that are shown
_UNSAFE_CHARS = re.compile(
    r'[\x00-\x1f\x7f-\xff"\\]'
)  # characters that would end the quotes or the line
SERVED_ROUTE = "tsx.served"  # key of a scope: the route of the request, and its job
BREAK_REASON = "tsx.ended"  # key of a scope: why the response is incomplete, unless its client left
CLIENT_DISCONNECTED = "the client disconnected"
BROKEN = "the answer was interrupted"


class AccessLog:
    """The log in TorchServe's format; lines on the console also have request id and model.

    A line is formatted after its response was sent. It is held back for at most `FLUSH_INTERVAL_S`
    seconds, so that several lines are written together.
    """

    def __init__(self, share: float = 1.0, *, is_json: bool = False, in_file: bool = False) -> None:
        self.share = share
        self._is_json = is_json
        self._book = Logbook(ACCESS_LOG, is_json=is_json)
        self._in_file = in_file
        self._skipped_until_next = _draw_gap(share)  # responses until the next line
        self._lines: list[str] = []
        self._clock_offset = 0.0  # time.time() - time.monotonic() for the waiting lines
        self._millisecond, self._stamp = 0, ""
        self._quoted_lines: dict[str, str] = {}  # sanitized request lines of the waiting lines
        self._is_due = False  # whether a timer is set that flushes

    def wants(self) -> bool:
        """Tell whether the next response gets a line; call this once for each response."""
        self._skipped_until_next -= 1
        if self._skipped_until_next:
            return False
        self._skipped_until_next = _draw_gap(self.share)
        return True

    def add(
        self,
        client: Any,
        line: str,
        status: int,
        start_time: float,
        end_time: float,
        request_id: bytes = b"",
        model: str = "",
        version: str = "",
        broken_reason: str = "",
    ) -> None:
        """Add a line.

        Args:
            client: (host, port), or None at a unix socket.
            line: The request line.
            status: The status of the response.
            start_time: When the request began, by time.monotonic().
            end_time: When the response ended.
            request_id: The id of the request.
            model: The name of the model.
            version: The version of the model.
            broken_reason: Why the response is incomplete.
        """
        lines = self._lines
        if not lines:
            self._clock_offset = time.time() - time.monotonic()
        log_time = self._clock_offset + end_time
        quoted = self._quoted_lines.get(line)
        if quoted is None:
            quoted = self._quoted_lines[line] = sanitized_line(line)
        elapsed_ms = int(1000 * (end_time - start_time))
        if self._is_json:
            fields = {
                "client": _peer(client),
                "status": status,
                "ms": elapsed_ms,
                "request_id": str(request_id, "latin-1"),
            }
            fields |= {
                "model": sanitized_line(model[:MAX_NAME_CHARS]),
                "version": version,
                "broken": broken_reason,
            }
            text = json_line(log_time, "info", ACCESS_LOG, quoted, fields)
        else:
            millisecond = int(1000 * log_time)
            if millisecond != self._millisecond:
                self._millisecond, self._stamp = millisecond, stamp(millisecond)
            text = f'{self._stamp} - /{_peer(client)} "{quoted}" {status} {elapsed_ms}'
            if request_id and not self._in_file:
                name = sanitized_line(model[:MAX_NAME_CHARS])  # A gRPC client may send any name.
                text += f" {str(request_id, 'latin-1')} {name or '-'} {version or '-'}"
            if broken_reason:
                text += f" ({broken_reason})"
        lines.append(text)
        if len(lines) >= MAX_BATCH_LINES:
            self.flush()
        elif not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_later(FLUSH_INTERVAL_S, self._flush_due)

    def flush(self) -> None:
        lines, self._lines = self._lines, []
        self._quoted_lines.clear()
        self._book.add_whole(lines)
        self._book.flush()

    def _flush_due(self) -> None:
        self._is_due = False
        self.flush()


def _peer(client: Any) -> str:
    return f"{client[0]}:{client[1]}" if client else "unix"


def access_log(settings: Settings) -> AccessLog | None:
    """Return the access log, or None if the settings turn it off."""
    if not settings.access_log:
        return None
    in_file = settings.log_location is not None
    is_json = writes_json(settings.log_format, in_files=in_file)
    return AccessLog(settings.access_log, is_json=is_json, in_file=in_file)


def _draw_gap(share: float) -> int:
    """Return a random number of responses until the next line.

    Each response has the same independent probability of a line. The number of responses between
    two lines is drawn, because a random number for each response would take more time.
    """
    return 1 if share >= 1.0 else 1 + int(math.log(1.0 - random.random()) / math.log(1.0 - share))


def sanitized_line(line: str) -> str:
    """Return a request line without secrets and without characters that break the log's line."""
    return escaped(redacted(line), _UNSAFE_CHARS)


class LoggedResponse:
    """The `send` of one request, which logs the response once it is sent.

    `close` logs a response that breaks off.
    """

    def __init__(self, log: AccessLog, scope: Scope, send: Send) -> None:
        self._log = log
        self._scope = scope
        self._send = send
        self._start_time = time.monotonic()
        self._status = 0  # 0 before the response begins and after its line is written
        self._request_id = b""

    async def __call__(self, message: Message) -> None:
        await self._send(message)
        if message["type"] == "http.response.start":
            self._status = message["status"]
            self._request_id = next(
                (value for name, value in message["headers"] if name == b"x-request-id"), b""
            )
        elif not message.get("more_body", False):
            self._write_line(self._scope.get(BREAK_REASON, ""))

    def close(self) -> None:
        if self._status:
            self._write_line(self._scope.get(BREAK_REASON, CLIENT_DISCONNECTED))

    def _write_line(self, broken_reason: str) -> None:
        scope, status, self._status = self._scope, self._status, 0
        model_and_version = _served_model(scope)
        self._log.add(
            scope.get("client"),
            _request_line(scope),
            status,
            self._start_time,
            time.monotonic(),
            self._request_id,
            *model_and_version,
            broken_reason,
        )


def _served_model(scope: Scope) -> tuple[str, str]:
    """Return the name and version of the model that answered a request."""
    if SERVED_ROUTE not in scope:
        return "", ""
    route, job = scope[SERVED_ROUTE]
    return route.name, getattr(job.routed or route, "version", "")


def _request_line(scope: Scope) -> str:
    path = scope.get("raw_path") or scope["path"].encode()
    query = b"?" + scope["query_string"] if scope["query_string"] else b""
    return f"{scope['method']} {str(path + query, 'latin-1')} HTTP/{scope['http_version']}"
