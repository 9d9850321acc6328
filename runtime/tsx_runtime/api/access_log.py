"""The access log: a line for each HTTP and gRPC answer (`/127.0.0.1:64003 "POST
/predictions/resnet-18 HTTP/1.1" 200 118`).
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

LONGEST_NAME = 128  # characters of a model's that are shown
_NOT_SHOWN = re.compile(
    r'[\x00-\x1f\x7f-\xff"\\]'
)  # of a request line: what would break the log's own
SERVED = "tsx.served"  # in a request's scope: where it was submitted, and the job
ENDED = "tsx.ended"  # in the same: why its answer has no end, where that is not its client
LEFT = "the client disconnected"
BROKEN = "the answer was interrupted"


class AccessLog:
    """In a file, a line has TorchServe's shape; elsewhere it goes on with the request's id and its
    model.

    A line is made when its answer is out, and waits at most `FLUSH_INTERVAL_S` seconds for others, with which
    it is passed on.
    """

    def __init__(self, share: float = 1.0, *, is_json: bool = False, in_file: bool = False) -> None:
        self.share = share
        self._is_json = is_json
        self._book = Logbook(ACCESS_LOG, is_json=is_json)
        self._in_file = in_file
        self._left = _gap(share)  # answers until the next one that has a line
        self._lines: list[str] = []
        self._since = 0.0  # time.time() when time.monotonic() was 0, of these lines
        self._millisecond, self._stamp = 0, ""
        self._shown: dict[str, str] = {}  # request lines of these lines, as they are shown
        self._is_due = False  # whether a timer will pass them on

    def wants(self) -> bool:
        """Whether this answer is to have a line."""
        self._left -= 1
        if self._left:
            return False
        self._left = _gap(self.share)
        return True

    def add(
        self,
        client: Any,
        line: str,
        status: int,
        began: float,
        ended: float,
        request_id: bytes = b"",
        model: str = "",
        version: str = "",
        broken: str = "",
    ) -> None:
        """`client` is (host, port), or None at a unix socket; the times are time.monotonic().

        `broken`: why the answer has no end.
        """
        lines = self._lines
        if not lines:
            self._since = time.time() - time.monotonic()
        at = self._since + ended
        quoted = self._shown.get(line)
        if quoted is None:
            quoted = self._shown[line] = shown(line)
        took = int(1000 * (ended - began))
        if self._is_json:
            about = {
                "client": _peer(client),
                "status": status,
                "ms": took,
                "request_id": str(request_id, "latin-1"),
            }
            about |= {"model": shown(model[:LONGEST_NAME]), "version": version, "broken": broken}
            text = json_line(at, "info", ACCESS_LOG, quoted, about)
        else:
            millisecond = int(1000 * at)
            if millisecond != self._millisecond:
                self._millisecond, self._stamp = millisecond, stamp(millisecond)
            text = f'{self._stamp} - /{_peer(client)} "{quoted}" {status} {took}'
            if request_id and not self._in_file:
                named = shown(model[:LONGEST_NAME])  # by gRPC, whatever a client says
                text += f" {str(request_id, 'latin-1')} {named or '-'} {version or '-'}"
            if broken:
                text += f" ({broken})"
        lines.append(text)
        if len(lines) >= MAX_BATCH_LINES:
            self.flush()
        elif not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_later(FLUSH_INTERVAL_S, self._flush_due)

    def flush(self) -> None:
        lines, self._lines = self._lines, []
        self._shown.clear()
        self._book.add_whole(lines)
        self._book.flush()

    def _flush_due(self) -> None:
        self._is_due = False
        self.flush()


def _peer(client: Any) -> str:
    return f"{client[0]}:{client[1]}" if client else "unix"


def access_log(settings: Settings) -> AccessLog | None:
    """As the settings ask for; None where there is none."""
    if not settings.access_log:
        return None
    in_file = settings.log_location is not None
    is_json = writes_json(settings.log_format, in_files=in_file)
    return AccessLog(settings.access_log, is_json=is_json, in_file=in_file)


def _gap(share: float) -> int:
    """So that each answer has a line with this probability, whatever those before it have: drawn
    once a line, not once an answer.
    """
    return 1 if share >= 1.0 else 1 + int(math.log(1.0 - random.random()) / math.log(1.0 - share))


def shown(line: str) -> str:
    """A request line that stays within its quotes and its line, whatever was sent, without the
    secrets of its query.
    """
    return escaped(redacted(line), _NOT_SHOWN)


class LoggedResponse:
    """The `send` of one request, which writes its line once the answer is out.

    `close` writes that of an answer that breaks off.
    """

    def __init__(self, log: AccessLog, scope: Scope, send: Send) -> None:
        self._log = log
        self._scope = scope
        self._send = send
        self._began = time.monotonic()
        self._status = 0  # 0: no answer has begun, or its line is written
        self._request_id = b""

    async def __call__(self, message: Message) -> None:
        await self._send(message)
        if message["type"] == "http.response.start":
            self._status = message["status"]
            self._request_id = next(
                (value for name, value in message["headers"] if name == b"x-request-id"), b""
            )
        elif not message.get("more_body", False):
            self._tell(self._scope.get(ENDED, ""))

    def close(self) -> None:
        if self._status:
            self._tell(self._scope.get(ENDED, LEFT))

    def _tell(self, broken: str) -> None:
        scope, status, self._status = self._scope, self._status, 0
        served = _served(scope)
        self._log.add(
            scope.get("client"),
            _request_line(scope),
            status,
            self._began,
            time.monotonic(),
            self._request_id,
            *served,
            broken,
        )


def _served(scope: Scope) -> tuple[str, str]:
    """The name and the version of the model that a request was for."""
    if SERVED not in scope:
        return "", ""
    route, job = scope[SERVED]
    return route.name, getattr(job.routed or route, "version", "")


def _request_line(scope: Scope) -> str:
    path = scope.get("raw_path") or scope["path"].encode()
    query = b"?" + scope["query_string"] if scope["query_string"] else b""
    return f"{scope['method']} {str(path + query, 'latin-1')} HTTP/{scope['http_version']}"
