"""The access log: a line for each answer, from both lanes (`/127.0.0.1:64003 "POST /predictions/resnet-18 HTTP/1.1" 200 118`)."""

from __future__ import annotations

import math
import random
import re
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tsx_runtime.errors import TsxError
from tsx_runtime.http.fast_lane.exchange import Exchange
from tsx_runtime.http.fast_lane.heads import Head
from tsx_runtime.http.semantics.messages import Message, Scope, Send
from tsx_runtime.settings.schema import Settings
from tsx_runtime.shared.line_log import ACCESS_LOG, Logbook
from tsx_runtime.shared.log_format import escaped, json_line, writes_json
from tsx_runtime.shared.redaction import redacted
from tsx_runtime.wire import Body, Buffer

if TYPE_CHECKING:
    from tsx_runtime.http.fast_lane.protocol import FastLane

SERVED = "tsx.served"  # in a request's scope: where it was submitted, and the job
ENDED = "tsx.ended"  # in the same: why its answer has no end, where that is not its client
LEFT = "the client left"
BROKEN = "the answer broke off"

LONGEST_NAME = 128  # characters of a model's that are shown
_NOT_SHOWN = re.compile(r'[\x00-\x1f\x7f-\xff"\\]')  # of a request line: what would break the log's own


class AccessLog:
    """In a file, a line has TorchServe's shape; elsewhere it goes on with the request's id and its model."""

    def __init__(self, share: float = 1.0, *, is_json: bool = False, in_file: bool = False) -> None:
        self.share = share
        self._book = Logbook(ACCESS_LOG, is_json=is_json)
        self._in_file = in_file
        self._left = _gap(share)  # answers until the next one that has a line

    def wants(self) -> bool:
        """Whether this answer is to have a line."""
        self._left -= 1
        if self._left:
            return False
        self._left = _gap(self.share)
        return True

    def add(
        self, client: Any, line: str, status: int, began: float, request_id: str = "", model: str = "", version: str = "", broken: str = ""
    ) -> None:
        """`client` is (host, port), or None at a unix socket; `began` is time.monotonic(). `broken`: why the answer has no end."""
        peer, model = f"{client[0]}:{client[1]}" if client else "unix", shown(model[:LONGEST_NAME])  # by gRPC, whatever a client calls it
        took, now = int(1000 * (time.monotonic() - began)), time.time()
        if self._book.is_json:
            about = {"client": peer, "status": status, "ms": took, "request_id": request_id, "model": model, "version": version}
            about["broken"] = broken
            self._book.add_soon(json_line(now, "info", ACCESS_LOG, line, about), now)
            return
        text = f'/{peer} "{line}" {status} {took}'
        if request_id and not self._in_file:
            text += f" {request_id} {model or '-'} {version or '-'}"
        if broken:
            text += f" ({broken})"
        self._book.add_soon(text, now)

    def flush(self) -> None:
        self._book.flush()

    def watch(self, scope: Scope, send: Send) -> Watched:
        """A `send` that writes the line once the answer is out."""
        return Watched(self, scope, send)


class Watched:
    """The `send` of one request. `close` when nothing more will be sent: an answer that has begun may have no end."""

    def __init__(self, log: AccessLog, scope: Scope, send: Send) -> None:
        self._log = log
        self._scope = scope
        self._send = send
        self._began = time.monotonic()
        self._status = 0  # 0: no answer has begun, or its line is written
        self._request_id = ""

    async def __call__(self, message: Message) -> None:
        await self._send(message)
        if message["type"] == "http.response.start":
            self._status = message["status"]
            self._request_id = next((str(value, "latin-1") for name, value in message["headers"] if name == b"x-request-id"), "")
        elif not message.get("more_body", False):
            self._tell("")

    def close(self) -> None:
        if self._status:
            self._tell(self._scope.get(ENDED, LEFT))

    def _tell(self, broken: str) -> None:
        scope, status, self._status = self._scope, self._status, 0
        served = _served(scope)
        self._log.add(scope.get("client"), _request_line(scope), status, self._began, self._request_id, *served, broken)


def access_log(settings: Settings) -> AccessLog | None:
    """As the settings ask for; None where there is none."""
    if not settings.access_log:
        return None
    in_file = settings.log_location is not None
    is_json = writes_json(settings.log_format, in_files=in_file)
    return AccessLog(settings.access_log, is_json=is_json, in_file=in_file)


def _gap(share: float) -> int:
    """So that each answer has a line with this probability, whatever those before it have: drawn once a line, not once an answer."""
    return 1 if share >= 1.0 else 1 + int(math.log(1.0 - random.random()) / math.log(1.0 - share))


class LoggedExchange(Exchange):
    """An exchange of the fast lane that writes its line when it is answered."""

    _told = False

    def __init__(self, connection: FastLane, head: Head, body: Body, arrived: float) -> None:
        super().__init__(connection, head, body, arrived)
        self.line = head.line

    def answer(self, status: int, headers: Buffer, body: Buffer) -> None:
        streamed = self._flow is not None
        super().answer(status, headers, body)
        self._tell(200 if streamed else status, BROKEN if streamed and status >= 400 else "")

    def refuse(self, error: TsxError) -> None:
        streamed = self._flow is not None
        super().refuse(error)
        self._tell(200 if streamed else error.status, BROKEN if streamed else "")

    def leave(self) -> None:
        if self._flow is not None:
            self._tell(200, LEFT)
        super().leave()

    def _tell(self, status: int, broken: str = "") -> None:
        log = self.connection.lane.log
        if not self._told and (broken or not self.gone) and log is not None:
            self._told = True
            served = self.connection.served_by(self)
            version = getattr(served, "version", "")  # of a split that has not picked one there is none
            request_id = self.request_id.decode()
            log.add(self.connection.client, shown(self.line), status, self.arrived, request_id, served.name, version, broken)


def some_logged(log: AccessLog) -> Callable[..., Exchange]:
    """Makes exchanges of which a share has a line; the others are plain."""

    def make(connection: FastLane, head: Head, body: Body, arrived: float) -> Exchange:
        return (LoggedExchange if log.wants() else Exchange)(connection, head, body, arrived)

    return make


def shown(line: str) -> str:
    """A request line that stays within its quotes and its line, whatever was sent, without the secrets of its query."""
    return escaped(redacted(line), _NOT_SHOWN)


def _served(scope: Scope) -> tuple[str, str]:
    """The name and the version of the model that a request was for."""
    if SERVED not in scope:
        return "", ""
    route, job = scope[SERVED]
    return route.name, getattr(job.routed or route, "version", "")


def _request_line(scope: Scope) -> str:
    path = scope.get("raw_path") or scope["path"].encode()
    query = b"?" + scope["query_string"] if scope["query_string"] else b""
    return shown(f"{scope['method']} {str(path + query, 'latin-1')} HTTP/{scope['http_version']}")
