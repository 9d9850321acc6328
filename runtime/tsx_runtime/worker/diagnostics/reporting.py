"""Reports to the front end of what a handler raised and printed, for the management API.

No request waits for them: a thread sends what was collected, within the bounds below.
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

REPORT_INTERVAL_S = 0.5
MAX_LINES = 200  # the newest lines of one report
MAX_LINE_CHARS = 1000
MAX_LINE_IDS = 8  # request ids with a line
MAX_ERRORS = 20  # different errors of one report
MAX_ERROR_IDS = 50  # request ids with an error

_LOGGER = "tsx.worker"


class ReportBuffer:
    """The content of the next report. Any thread may add to it without blocking."""

    def __init__(self) -> None:
        self._lines: deque[tuple[float, str, str, list[str]]] = deque(maxlen=MAX_LINES)
        self._lost = 0
        self._errors: dict[str, dict[str, Any]] = {}
        self._partial = {"stdout": "", "stderr": ""}  # incomplete lines
        self._lock = threading.RLock()  # A signal's handler may print while this thread holds it.
        # A process forked by a handler has no thread that sends, and maybe a locked lock.
        self._pid = os.getpid()
        self.due = threading.Event()

    def add_output(self, stream: str, text: str, ids: Sequence[str] = ()) -> None:
        """Add printed text, line by line."""
        if os.getpid() != self._pid:
            return
        now, ids = time.time(), list(ids[:MAX_LINE_IDS])
        with self._lock:
            *lines, partial = (self._partial[stream] + text).split("\n")
            self._partial[stream] = partial[:MAX_LINE_CHARS]
            self._lost += max(0, len(lines) + len(self._lines) - MAX_LINES)
            self._lines.extend(
                (now, stream, line[:MAX_LINE_CHARS].rstrip("\r"), ids)
                for line in lines[-MAX_LINES:]
            )
        if lines:
            self.due.set()

    def add_error(self, message: str, trace: str, ids: Sequence[str] = ()) -> None:
        """Add an error, or count it if it is known.

        A handler that always fails must not pay for each report.
        """
        if os.getpid() != self._pid:
            return
        with self._lock:
            known = self._errors.get(trace or message)
            if known is not None:
                known["count"] += 1
                known["message"] = message
                known["request_ids"] = [*known["request_ids"], *ids][-MAX_ERROR_IDS:]
            elif len(self._errors) < MAX_ERRORS:
                self._errors[trace or message] = {
                    "message": message,
                    "traceback": trace,
                    "count": 1,
                    "request_ids": list(ids[-MAX_ERROR_IDS:]),
                }
        self.due.set()

    def take(self) -> dict[str, Any] | None:
        """Return the report and begin the next one; None if there is nothing to report."""
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
    """A log handler that reports errors: the log has one for each failed batch."""

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
    """Report the logged errors and the output of this process to the front end meanwhile.

    Args:
        channel: The channel to the front end.
        running: Returns the ids of the running requests.
    """
    buffer, closed = ReportBuffer(), threading.Event()
    logger, errors = logging.getLogger(_LOGGER), _Errors(buffer, running)
    streams = [(getattr(getattr(sys, name), "buffer", None), name) for name in ("stdout", "stderr")]
    copied = [(raw, name) for raw, name in streams if isinstance(raw, LossyOutput)]
    logger.addHandler(errors)
    for raw, name in copied:
        raw.copy = lambda data, name=name: buffer.add_output(
            name, str(data, "utf-8", "replace"), running()
        )
    threading.Thread(
        target=_send_reports, args=(channel, buffer, closed), name="tsx-reports", daemon=True
    ).start()
    try:
        yield
    finally:
        logger.removeHandler(errors)
        for raw, _ in copied:
            raw.copy = None
        closed.set()
        buffer.due.set()
        with suppress(OSError):
            _send_report(channel, buffer)


def _send_reports(channel: FrameSocket, buffer: ReportBuffer, closed: threading.Event) -> None:
    with suppress(OSError):  # The reader finds out that the front end has gone.
        while not closed.is_set():
            buffer.due.wait()
            if not closed.wait(REPORT_INTERVAL_S):
                _send_report(channel, buffer)


def _send_report(channel: FrameSocket, buffer: ReportBuffer) -> None:
    report = buffer.take()
    if report is not None:
        channel.send(Kind.REPORT, 0, extra=json.dumps(report).encode())
