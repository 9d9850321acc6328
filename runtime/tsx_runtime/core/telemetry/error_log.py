"""The last errors of a version, with tracebacks, and the last lines that its workers printed."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from tsx_runtime.errors import shortened

MAX_ERRORS = 50
MAX_ERRORS_OF_KIND = 10
MAX_REQUEST_IDS = 50  # newest requests of an error that are kept
MAX_LINES = 1000
# A longer traceback is cut in the middle, since its ends matter most.
MAX_TEXT_CHARS = 16 << 10
MAX_ID_CHARS = 200


class LoggedError(NamedTuple):
    at: float  # time.time() of the newest occurrence
    first: float  # time.time() of the oldest occurrence
    times: int
    message: str
    traceback: str
    request_ids: tuple[str, ...]
    kind: str  # see `kind_of`


class KindCount(NamedTuple):
    """The number of errors of one kind, including errors that are no longer kept."""

    times: int
    first: float  # time.time() of the first one


class OutputLine(NamedTuple):
    number: int  # unique and increasing
    at: float  # time.time()
    worker: str
    stream: str  # stdout, stderr
    text: str
    request_ids: list[str]  # requests of the batch that ran at that time


class ErrorLog:
    """The newest errors and lines, in limited memory.

    A repeated error is one entry with a count, so that it does not displace others.
    """

    __slots__ = ("_clock", "errors", "kinds", "lines", "number", "total")

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self.errors: deque[LoggedError] = deque(maxlen=MAX_ERRORS)  # newest first
        self.kinds: dict[str, KindCount] = {}  # the kinds of these errors
        self.lines: deque[OutputLine] = deque(maxlen=MAX_LINES)
        self.total = 0  # number of all errors
        self.number = 0  # `OutputLine.number` of the newest line

    def add_report(self, worker: str, facts: Mapping[str, Any]) -> None:
        """Add the errors and lines of a REPORT frame."""
        for error in facts["errors"]:
            ids = [str(request_id)[:MAX_ID_CHARS] for request_id in error["request_ids"]]
            self.add_error(str(error["message"]), str(error["traceback"]), int(error["count"]), ids)
        if facts["lost"]:
            self.add_line(self._clock(), worker, "stderr", f"[{facts['lost']} lines omitted]")
        for at, stream, text, ids in facts["lines"]:
            self.add_line(
                float(at), worker, str(stream), str(text), [str(request_id) for request_id in ids]
            )

    def add_error(
        self, message: str, traceback: str = "", count: int = 1, ids: Sequence[str] = ()
    ) -> None:
        self.total += count
        now = self._clock()
        message, short_traceback = (
            shortened(text, MAX_TEXT_CHARS, tail=MAX_TEXT_CHARS // 2)
            for text in (message, traceback)
        )
        kind = kind_of(message, short_traceback)
        old_count = self.kinds.get(kind, KindCount(0, now))
        counted = KindCount(old_count.times + count, old_count.first)
        previous = next(
            (
                error
                for error in self.errors
                if error.traceback == short_traceback
                and (short_traceback or error.message == message)
            ),
            None,
        )
        if previous is not None:
            self.errors.remove(previous)
        first_time, count, ids = (
            (now, count, ids)
            if previous is None
            else (previous.first, previous.times + count, (*previous.request_ids, *ids))
        )
        self.errors.appendleft(
            LoggedError(
                now,
                first_time,
                count,
                message,
                short_traceback,
                tuple(ids[-MAX_REQUEST_IDS:]),
                kind,
            )
        )
        same_kind = [error for error in self.errors if error.kind == kind]
        if len(same_kind) > MAX_ERRORS_OF_KIND:
            self.errors.remove(same_kind[-1])
        self.kinds = {error.kind: self.kinds.get(error.kind, counted) for error in self.errors} | {
            kind: counted
        }

    def add_line(
        self, at: float, worker: str, stream: str, text: str, ids: Sequence[str] = ()
    ) -> None:
        self.number += 1
        self.lines.append(OutputLine(self.number, at, worker, stream, text, list(ids)))


def kind_of(message: str, traceback: str) -> str:
    """Return the traceback without the exception's message, or else the message.

    It is equal for all exceptions that are raised at the same line.
    """
    lines = traceback.rstrip().split("\n")
    last = next((index for index in reversed(range(len(lines))) if lines[index][:1].strip()), None)
    return message if last is None else "\n".join([*lines[:last], lines[last].partition(":")[0]])
