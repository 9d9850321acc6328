"""The last errors of a version, with tracebacks, and the last lines that its workers printed."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from tsx_runtime.errors import shortened

KEPT_ERRORS = 50
KEPT_ALIKE = 10  # of them, of one kind
KEPT_IDS = 50  # of an error: the newest requests that met it
KEPT_LINES = 1000
LONGEST = (
    16 << 10
    # characters of a traceback; of a longer one the middle is left out, since what matters stands
    # at its ends
)
LONGEST_ID = 200  # characters


class LoggedError(NamedTuple):
    at: float  # time.time() of the newest
    first: float  # time.time() of the oldest
    times: int
    message: str
    traceback: str
    request_ids: tuple[str, ...]
    kind: str  # see `kind_of`


class KindCount(NamedTuple):
    """Errors of one kind, also those that are not kept."""

    times: int
    first: float  # time.time()


class OutputLine(NamedTuple):
    number: int  # each has one of its own, and a later one has a greater
    at: float  # time.time()
    worker: str
    stream: str  # stdout, stderr
    text: str
    request_ids: list[str]  # of the batch that ran then


class ErrorLog:
    """Bounded, whatever a worker says.

    The same error again is one entry that counts, so that it does not push out all others.
    """

    __slots__ = ("_clock", "errors", "kinds", "lines", "number", "total")

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self.errors: deque[LoggedError] = deque(maxlen=KEPT_ERRORS)  # newest first
        self.kinds: dict[str, KindCount] = {}  # of these errors
        self.lines: deque[OutputLine] = deque(maxlen=KEPT_LINES)
        self.total = 0  # errors
        self.number = 0  # of the newest line

    def add_report(self, worker: str, facts: Mapping[str, Any]) -> None:
        """What a REPORT frame holds."""
        for error in facts["errors"]:
            ids = [str(each)[:LONGEST_ID] for each in error["request_ids"]]
            self.add_error(str(error["message"]), str(error["traceback"]), int(error["count"]), ids)
        if facts["lost"]:
            self.add_line(self._clock(), worker, "stderr", f"[{facts['lost']} lines omitted]")
        for at, stream, text, ids in facts["lines"]:
            self.add_line(float(at), worker, str(stream), str(text), [str(each) for each in ids])

    def add_error(
        self, message: str, traceback: str = "", count: int = 1, ids: Sequence[str] = ()
    ) -> None:
        self.total += count
        now = self._clock()
        message, cut = (
            shortened(text, LONGEST, tail=LONGEST // 2) for text in (message, traceback)
        )
        kind = kind_of(message, cut)
        before = self.kinds.get(kind, KindCount(0, now))
        counted = KindCount(before.times + count, before.first)
        known = next(
            (
                error
                for error in self.errors
                if error.traceback == cut and (cut or error.message == message)
            ),
            None,
        )
        if known is not None:
            self.errors.remove(known)
        first, count, ids = (
            (now, count, ids)
            if known is None
            else (known.first, known.times + count, (*known.request_ids, *ids))
        )
        self.errors.appendleft(
            LoggedError(now, first, count, message, cut, tuple(ids[-KEPT_IDS:]), kind)
        )
        alike = [error for error in self.errors if error.kind == kind]
        if len(alike) > KEPT_ALIKE:
            self.errors.remove(alike[-1])
        self.kinds = {error.kind: self.kinds.get(error.kind, counted) for error in self.errors} | {
            kind: counted
        }

    def add_line(
        self, at: float, worker: str, stream: str, text: str, ids: Sequence[str] = ()
    ) -> None:
        self.number += 1
        self.lines.append(OutputLine(self.number, at, worker, stream, text, list(ids)))


def kind_of(message: str, traceback: str) -> str:
    """The same for the same exception raised at the same place, whatever it says: the traceback
    without the exception's own words.
    """
    lines = traceback.rstrip().split("\n")
    last = next((place for place in reversed(range(len(lines))) if lines[place][:1].strip()), None)
    return message if last is None else "\n".join([*lines[:last], lines[last].partition(":")[0]])
