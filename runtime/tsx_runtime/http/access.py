"""The access log: a line for each answer, from both lanes (`/127.0.0.1:64003 "POST /predictions/resnet-18 HTTP/1.1" 200 118`)."""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING, Any

from tsx_runtime.errors import TsxError
from tsx_runtime.http.asgi import Message, Scope, Send
from tsx_runtime.http.exchange import Exchange
from tsx_runtime.http.heads import Head
from tsx_runtime.http.logbook import ACCESS_LOG, Logbook
from tsx_runtime.wire import Body, Buffer

if TYPE_CHECKING:
    from tsx_runtime.http.protocol import FastLane

_NOT_SHOWN = re.compile(r'[\x00-\x1f\x7f-\xff"\\]')  # of a request line: what would break the log's own


class AccessLog:
    def __init__(self) -> None:
        self._book = Logbook(ACCESS_LOG)

    def add(self, client: Any, line: str, status: int, began: float) -> None:
        """`client` is (host, port), or None at a unix socket; `began` is time.monotonic()."""
        peer = f"{client[0]}:{client[1]}" if client else "unix"
        self._book.add_soon(f'/{peer} "{line}" {status} {int(1000 * (time.monotonic() - began))}', time.time())

    def flush(self) -> None:
        self._book.flush()

    def watch(self, scope: Scope, send: Send) -> Send:
        """A `send` that writes the line once the answer is out."""
        began, status = time.monotonic(), 0

        async def watched(message: Message) -> None:
            nonlocal status
            await send(message)
            if message["type"] == "http.response.start":
                status = message["status"]
            elif not message.get("more_body", False):
                self.add(scope.get("client"), _request_line(scope), status, began)

        return watched


class LoggedExchange(Exchange):
    """An exchange of the fast lane that writes its line when it is answered."""

    _told = False

    def __init__(self, connection: FastLane, head: Head, body: Body, arrived: float) -> None:
        super().__init__(connection, head, body, arrived)
        self.line = head.line

    def answer(self, status: int, headers: Buffer, body: Buffer) -> None:
        streamed = self._flow is not None
        super().answer(status, headers, body)
        self._tell(200 if streamed else status)

    def refuse(self, error: TsxError) -> None:
        super().refuse(error)
        self._tell(error.status)

    def _tell(self, status: int) -> None:
        log = self.connection.lane.log
        if not self._told and not self.gone and log is not None:
            self._told = True
            log.add(self.connection.client, shown(self.line), status, self.arrived)


def shown(line: str) -> str:
    """A request line that stays within its quotes and its line, whatever was sent."""
    return _NOT_SHOWN.sub(lambda found: f"\\x{ord(found[0]):02x}", line)


def _request_line(scope: Scope) -> str:
    path = scope.get("raw_path") or scope["path"].encode()
    query = b"?" + scope["query_string"] if scope["query_string"] else b""
    return shown(f"{scope['method']} {str(path + query, 'latin-1')} HTTP/{scope['http_version']}")
