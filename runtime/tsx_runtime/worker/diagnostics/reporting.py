"""Reports to the front end what a handler raised and printed, so that the management API can show
it.

No request waits for it: a thread sends what was collected for a moment, within the bounds below.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from tsx_runtime.shared.nonblocking_output import LossyOutput
from tsx_runtime.wire import Kind
from tsx_runtime.worker.channel import FrameSocket
from tsx_runtime.worker.diagnostics.tracebacks import format_error
from tsx_runtime.worker.exceptions import presentable

EVERY = 0.5  # seconds between two reports
MOST = 200  # lines of one report; of more the newest
LONGEST = 1000  # characters of a line
MOST_IDS = 8  # that a line names
MOST_ERRORS = 20  # different ones of one report
MOST_ERROR_IDS = 50  # that an error names

_LOGGER = "tsx.worker"


class ReportBuffer:
    """The content of the next report. Any thread may add to it; adding does not block."""

    def __init__(self) -> None:
        self._lines: deque[tuple[float, str, str, list[str]]] = deque(maxlen=MOST)
        self._lost = 0
        self._errors: dict[str, dict[str, Any]] = {}
        self._begun = {"stdout": "", "stderr": ""}  # of a line that is not complete yet
        self._lock = threading.RLock()  # a signal's handler may print while this thread holds it
        # a process forked by a handler has no sending thread, and maybe a lock that is never
        # released
        self._pid = os.getpid()
        self.due = threading.Event()

    def add_output(self, stream: str, text: str, ids: Sequence[str] = ()) -> None:
        if os.getpid() != self._pid:
            return
        now, ids = time.time(), list(ids[:MOST_IDS])
        with self._lock:
            *lines, begun = (self._begun[stream] + text).split("\n")
            self._begun[stream] = begun[:LONGEST]
            self._lost += max(0, len(lines) + len(self._lines) - MOST)
            self._lines.extend(
                (now, stream, line[:LONGEST].rstrip("\r"), ids) for line in lines[-MOST:]
            )
        if lines:
            self.due.set()

    def add_error(self, message: str, trace: str, ids: Sequence[str] = ()) -> None:
        """A repeated error is only counted: a handler that always fails must not pay for each
        report.
        """
        if os.getpid() != self._pid:
            return
        with self._lock:
            known = self._errors.get(trace or message)
            if known is not None:
                known["count"] += 1
                known["message"] = message
                known["request_ids"] = [*known["request_ids"], *ids][-MOST_ERROR_IDS:]
            elif len(self._errors) < MOST_ERRORS:
                self._errors[trace or message] = {
                    "message": message,
                    "traceback": trace,
                    "count": 1,
                    "request_ids": list(ids[-MOST_ERROR_IDS:]),
                }
        self.due.set()

    def take(self) -> dict[str, Any] | None:
        with self._lock:
            self.due.clear()
            report = {
                "lines": list(self._lines),
                "lost": self._lost,
                "errors": list(self._errors.values()),
            }
            self._lines.clear()
            self._errors.clear()
            self._lost = 0
        return report if report["lines"] or report["errors"] else None


class _Errors(logging.Handler):
    """A log handler: the log has one error for each failed batch."""

    def __init__(self, buffer: ReportBuffer, running: Callable[[], Sequence[str]]) -> None:
        super().__init__(logging.ERROR)
        self._buffer = buffer
        self._running = running

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        ids = getattr(record, "request_ids", None) or self._running()
        self._buffer.add_error(
            presentable(record.getMessage()), "" if error is None else format_error(error), ids
        )


@contextmanager
def reporting(channel: FrameSocket, running: Callable[[], Sequence[str]] = tuple) -> Iterator[None]:
    """While this is open, the worker's logged errors and this process's output are reported to the
    front end.

    `running`: the ids of the requests that run.
    """
    buffer, over = ReportBuffer(), threading.Event()
    logger, errors = logging.getLogger(_LOGGER), _Errors(buffer, running)
    streams = [(getattr(getattr(sys, name), "buffer", None), name) for name in ("stdout", "stderr")]
    copied = [(raw, name) for raw, name in streams if isinstance(raw, LossyOutput)]
    logger.addHandler(errors)
    for raw, name in copied:
        raw.copy = lambda data, name=name: buffer.add_output(
            name, str(data, "utf-8", "replace"), running()
        )
    threading.Thread(
        target=_send, args=(channel, buffer, over), name="tsx-reports", daemon=True
    ).start()
    try:
        yield
    finally:
        logger.removeHandler(errors)
        for raw, _ in copied:
            raw.copy = None
        over.set()
        buffer.due.set()
        with suppress(OSError):
            _tell(channel, buffer)


def _send(channel: FrameSocket, buffer: ReportBuffer, over: threading.Event) -> None:
    with suppress(OSError):  # the front end is gone, which its reader finds out
        while not over.is_set():
            buffer.due.wait()
            if not over.wait(EVERY):
                _tell(channel, buffer)


def _tell(channel: FrameSocket, buffer: ReportBuffer) -> None:
    report = buffer.take()
    if report is not None:
        channel.send(Kind.REPORT, 0, extra=json.dumps(report).encode())
