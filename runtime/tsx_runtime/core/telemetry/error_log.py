"""The last errors of a version, with tracebacks, and the last lines that its workers printed."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from tsx_runtime.errors import shortened

KEPT_ERRORS = 50
KEPT_LINES = 1000
LONGEST = 16 << 10  # characters of a traceback; of a longer one the middle is left out, since what matters stands at its ends


class LoggedError(NamedTuple):
    at: float  # time.time() of the newest
    times: int  # how often in a row
    message: str
    traceback: str


class OutputLine(NamedTuple):
    number: int  # each has one of its own, and a later one has a greater
    at: float  # time.time()
    worker: str
    stream: str  # stdout, stderr
    text: str
    request_ids: list[str]  # of the batch that ran then


class ErrorLog:
    """Bounded, whatever a worker says. The same error again and again is one entry that counts, so that it does not push out all others."""

    __slots__ = ("_clock", "errors", "lines", "number", "total")

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self.errors: deque[LoggedError] = deque(maxlen=KEPT_ERRORS)  # newest first
        self.lines: deque[OutputLine] = deque(maxlen=KEPT_LINES)
        self.total = 0  # errors
        self.number = 0  # of the newest line

    def add_report(self, worker: str, facts: Mapping[str, Any]) -> None:
        """What a REPORT frame holds."""
        for error in facts["errors"]:
            self.add_error(str(error["message"]), str(error["traceback"]), int(error["count"]))
        if facts["lost"]:
            self.add_line(self._clock(), worker, "stderr", f"[{facts['lost']} lines omitted]")
        for at, stream, text, ids in facts["lines"]:
            self.add_line(float(at), worker, str(stream), str(text), [str(each) for each in ids])

    def add_error(self, message: str, traceback: str = "", count: int = 1) -> None:
        self.total += count
        cut = shortened(traceback, LONGEST, tail=LONGEST // 2)
        if self.errors and self.errors[0].traceback == cut and (cut or self.errors[0].message == message):
            count += self.errors.popleft().times
        self.errors.appendleft(LoggedError(self._clock(), count, shortened(message, LONGEST, tail=LONGEST // 2), cut))

    def add_line(self, at: float, worker: str, stream: str, text: str, ids: Sequence[str] = ()) -> None:
        self.number += 1
        self.lines.append(OutputLine(self.number, at, worker, stream, text, list(ids)))
