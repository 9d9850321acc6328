"""The access log: a line for each HTTP and gRPC answer (`/127.0.0.1:64003 "POST /predictions/resnet-18 HTTP/1.1" 200 118`)."""

from __future__ import annotations

import math
import random
import re
import time
from typing import Any

from tsx_runtime.settings.schema import Settings
from tsx_runtime.shared.line_log import ACCESS_LOG, Logbook
from tsx_runtime.shared.log_format import escaped, json_line, writes_json
from tsx_runtime.shared.redaction import redacted

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
