"""The access log: a line for each HTTP and gRPC answer (`/127.0.0.1:64003 "POST /predictions/resnet-18 HTTP/1.1" 200 118`)."""

from __future__ import annotations

import asyncio
import math
import random
import re
import time
from typing import Any

from tsx_runtime.settings.schema import Settings
from tsx_runtime.shared.line_log import ACCESS_LOG, EVERY, TOGETHER, Logbook, stamp
from tsx_runtime.shared.log_format import escaped, json_line, writes_json
from tsx_runtime.shared.redaction import redacted

LONGEST_NAME = 128  # characters of a model's that are shown
_NOT_SHOWN = re.compile(r'[\x00-\x1f\x7f-\xff"\\]')  # of a request line: what would break the log's own


class AccessLog:
    """In a file, a line has TorchServe's shape; elsewhere it goes on with the request's id and its model.

    A line is made when its answer is out, and waits at most `EVERY` seconds for others, with which it is passed on.
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
        """`client` is (host, port), or None at a unix socket; the times are time.monotonic(). `broken`: why the answer has no end."""
        lines = self._lines
        if not lines:
            self._since = time.time() - time.monotonic()
        at = self._since + ended
        quoted = self._shown.get(line)
        if quoted is None:
            quoted = self._shown[line] = shown(line)
        took = int(1000 * (ended - began))
        if self._is_json:
            about = {"client": _peer(client), "status": status, "ms": took, "request_id": str(request_id, "latin-1")}
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
        if len(lines) >= TOGETHER:
            self.flush()
        elif not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_later(EVERY, self._flush_due)

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
    """So that each answer has a line with this probability, whatever those before it have: drawn once a line, not once an answer."""
    return 1 if share >= 1.0 else 1 + int(math.log(1.0 - random.random()) / math.log(1.0 - share))


def shown(line: str) -> str:
    """A request line that stays within its quotes and its line, whatever was sent, without the secrets of its query."""
    return escaped(redacted(line), _NOT_SHOWN)
