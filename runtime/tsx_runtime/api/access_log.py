"""The access log: a line for each HTTP and gRPC answer (`/127.0.0.1:64003 "POST /predictions/resnet-18 HTTP/1.1" 200 118`)."""

from __future__ import annotations

import asyncio
import math
import random
import re
import time
from typing import Any, TypeAlias

from tsx_runtime.settings.schema import Settings
from tsx_runtime.shared.line_log import ACCESS_LOG, EVERY, Logbook, stamp
from tsx_runtime.shared.log_format import escaped, json_line, writes_json
from tsx_runtime.shared.redaction import redacted

TURN = 256  # lines that are made in one turn of the event loop: a quarter of a millisecond, in JSON one or two
LONGEST_NAME = 128  # characters of a model's that are shown
_NOT_SHOWN = re.compile(r'[\x00-\x1f\x7f-\xff"\\]')  # of a request line: what would break the log's own

_Answer: TypeAlias = tuple[Any, str, int, float, float, bytes, str, str, str]  # the arguments of `add`


class AccessLog:
    """In a file, a line has TorchServe's shape; elsewhere it goes on with the request's id and its model.

    Answers are gathered, and their lines are made and passed on together, at most `TURN` in one turn of the event loop.
    """

    def __init__(self, share: float = 1.0, *, is_json: bool = False, in_file: bool = False) -> None:
        self.share = share
        self._book = Logbook(ACCESS_LOG, is_json=is_json)
        self._in_file = in_file
        self._left = _gap(share)  # answers until the next one that has a line
        self._answers: list[_Answer] = []
        self._is_due = False  # whether a timer will write them

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
        answers = self._answers
        answers.append((client, line, status, began, ended, request_id, model, version, broken))
        if len(answers) >= TURN:
            self._write_lines()
        elif not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_later(EVERY, self._write_due)

    def flush(self) -> None:
        if self._answers:
            self._write_lines()
        self._book.flush()

    def _write_due(self) -> None:
        self._is_due = False
        self.flush()

    def _write_lines(self) -> None:
        answers, self._answers = self._answers, []
        since = time.time() - time.monotonic()
        self._book.add_whole([_json(answer, since) for answer in answers] if self._book.is_json else self._texts(answers, since))

    def _texts(self, answers: list[_Answer], since: float) -> list[str]:
        texts, at, now = [], 0, ""
        known: dict[str, str] = {}  # request lines as they are shown
        for client, line, status, began, ended, request_id, model, version, broken in answers:
            millisecond = int(1000 * (since + ended))
            if millisecond != at:
                at, now = millisecond, stamp(millisecond)
            quoted = known.get(line)
            if quoted is None:
                quoted = known[line] = shown(line)
            text = f'{now} - /{_peer(client)} "{quoted}" {status} {int(1000 * (ended - began))}'
            if request_id and not self._in_file:
                named = shown(model[:LONGEST_NAME])  # by gRPC, whatever a client says
                text += f" {str(request_id, 'latin-1')} {named or '-'} {version or '-'}"
            texts.append(f"{text} ({broken})" if broken else text)
        return texts


def _json(answer: _Answer, since: float) -> str:
    client, line, status, began, ended, request_id, model, version, broken = answer
    about = {"client": _peer(client), "status": status, "ms": int(1000 * (ended - began)), "request_id": str(request_id, "latin-1")}
    about |= {"model": shown(model[:LONGEST_NAME]), "version": version, "broken": broken}
    return json_line(since + ended, "info", ACCESS_LOG, shown(line), about)


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
