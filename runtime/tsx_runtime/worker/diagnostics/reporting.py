"""Reports of a handler's errors and output, sent to the front end for the management API.

No request waits for them: a thread collects them within the limits below, and sends them.
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
from tsx_runtime.worker.exceptions import shorten_and_escape

REPORT_INTERVAL_S = 0.5
MAX_LINES = 200  # A report has the newest lines.
MAX_LINE_CHARS = 1000
MAX_LINE_IDS = 8  # request ids per line
MAX_ERRORS = 20  # different errors per report
MAX_ERROR_IDS = 50  # request ids per error

_LOGGER = "tsx.worker"


class ReportBuffer:
    """The content of the next report. Any thread may add to it without blocking."""

    def __init__(self) -> None:
        self._lines: deque[tuple[float, str, str, list[str]]] = deque(maxlen=MAX_LINES)
        self._lost_lines = 0
        self._errors: dict[str, dict[str, Any]] = {}
        self._partial_lines = {"stdout": "", "stderr": ""}  # incomplete lines
        # A signal handler may print while its own thread holds the lock.
        self._lock = threading.RLock()
        # In a process that the handler has forked, no thread sends reports, and the lock may stay
        # locked. Nothing is collected there.
        self._pid = os.getpid()
        self.has_news = threading.Event()

    def add_output(self, stream: str, text: str, ids: Sequence[str] = ()) -> None:
        """Add printed text, line by line."""
        if os.getpid() != self._pid:
            return
        now, ids = time.time(), list(ids[:MAX_LINE_IDS])
        with self._lock:
            *lines, partial = (self._partial_lines[stream] + text).split("\n")
            self._partial_lines[stream] = partial[:MAX_LINE_CHARS]
            self._lost_lines += max(0, len(lines) + len(self._lines) - MAX_LINES)
            self._lines.extend(
                (now, stream, line[:MAX_LINE_CHARS].rstrip("\r"), ids)
                for line in lines[-MAX_LINES:]
            )
        if lines:
            self.has_news.set()

    def add_error(self, message: str, trace: str, ids: Sequence[str] = ()) -> None:
        """Add an error, or count it if the report has it already.

        Thus the reports of a handler that always fails stay small.
        """
        if os.getpid() != self._pid:
            return
        with self._lock:
            entry = self._errors.get(trace or message)
            if entry is not None:
                entry["count"] += 1
                entry["message"] = message
                entry["request_ids"] = [*entry["request_ids"], *ids][-MAX_ERROR_IDS:]
            elif len(self._errors) < MAX_ERRORS:
                self._errors[trace or message] = {
                    "message": message,
                    "traceback": trace,
                    "count": 1,
                    "request_ids": list(ids[-MAX_ERROR_IDS:]),
                }
        self.has_news.set()

    def take(self) -> dict[str, Any] | None:
        """Return the report and begin the next one; None if there is nothing to report."""
        with self._lock:
            self.has_news.clear()
            report = {
                "lines": list(self._lines),
                "lost": self._lost_lines,
                "errors": list(self._errors.values()),
            }
            self._lines.clear()
            self._errors.clear()
            self._lost_lines = 0
        return report if report["lines"] or report["errors"] else None


class _ErrorReporter(logging.Handler):
    """A log handler that adds each logged error to the report. Each failed batch logs one."""

    def __init__(self, buffer: ReportBuffer, get_running_ids: Callable[[], Sequence[str]]) -> None:
        super().__init__(logging.ERROR)
        self._buffer = buffer
        self._get_running_ids = get_running_ids

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        ids = getattr(record, "request_ids", None) or self._get_running_ids()
        self._buffer.add_error(
            shorten_and_escape(record.getMessage()),
            "" if error is None else format_error(error),
            ids,
        )


@contextmanager
def report_to_front_end(
    channel: FrameSocket, get_running_ids: Callable[[], Sequence[str]] = tuple
) -> Iterator[None]:
    """Report logged errors and output of this process to the front end while the context is open.

    Args:
        channel: The channel to the front end.
        get_running_ids: Returns the ids of the running requests.
    """
    buffer, closed = ReportBuffer(), threading.Event()
    logger, error_reporter = logging.getLogger(_LOGGER), _ErrorReporter(buffer, get_running_ids)
    streams = [(getattr(getattr(sys, name), "buffer", None), name) for name in ("stdout", "stderr")]
    streams_to_copy = [(raw, name) for raw, name in streams if isinstance(raw, LossyOutput)]
    logger.addHandler(error_reporter)
    for raw, name in streams_to_copy:
        raw.copy = lambda data, name=name: buffer.add_output(
            name, str(data, "utf-8", "replace"), get_running_ids()
        )
    threading.Thread(
        target=_send_reports, args=(channel, buffer, closed), name="tsx-reports", daemon=True
    ).start()
    try:
        yield
    finally:
        logger.removeHandler(error_reporter)
        for raw, _ in streams_to_copy:
            raw.copy = None
        closed.set()
        buffer.has_news.set()
        with suppress(OSError):
            _send_report(channel, buffer)


def _send_reports(channel: FrameSocket, buffer: ReportBuffer, closed: threading.Event) -> None:
    with suppress(OSError):  # If the front end has gone, the reading thread notices it.
        while not closed.is_set():
            buffer.has_news.wait()
            if not closed.wait(REPORT_INTERVAL_S):
                _send_report(channel, buffer)


def _send_report(channel: FrameSocket, buffer: ReportBuffer) -> None:
    report = buffer.take()
    if report is not None:
        channel.send(Kind.REPORT, 0, extra=json.dumps(report).encode())
