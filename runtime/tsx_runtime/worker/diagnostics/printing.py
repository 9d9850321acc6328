"""The format of what a handler prints or logs.

Lines get the model's name and the ids of the running requests, or their level.
"""

from __future__ import annotations

import codecs
import logging
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any, Literal, NamedTuple

from tsx_runtime.shared.log_format import (
    LEVEL_MARK,
    LEVEL_MARK_END,
    MAX_IDS,
    JsonLines,
    escaped,
    has_colour,
    json_line,
    loss_line,
)
from tsx_runtime.shared.nonblocking_output import LossyOutput
from tsx_runtime.worker.diagnostics.failures import Repeats
from tsx_runtime.worker.diagnostics.tracebacks import format_error, outline
from tsx_runtime.worker.handler_api.context import Context

MAX_LINE_BYTES = 64 << 10  # Longer lines are split.
TEXT = "%(asctime)s %(levelname)-7s %(name)s (pid %(process)d): %(message)s"

_LINE = re.compile(r"([^\r\n]*)(\r\n|\r|\n|\Z)")

# Text is for a terminal, JSON for programs. Marked lines are for the front end, which writes
# model_log.log: its lines of the log carry their level.
OutputFormat = Literal["text", "json", "marked"]
Ids = Callable[[], Sequence[str]]  # returns the ids of the running requests


task_context: ContextVar[Context] = ContextVar("tsx_context")  # set for a request with its own task


class RunningIds:
    """The ids of the running requests, once there is a context.

    In a thread of the handler, they are the ids of the worker's batch.
    """

    context: Context | None = None

    def __call__(self) -> Sequence[str]:
        context = task_context.get(self.context)
        return () if context is None else context.running_ids()


class ModelLabel(NamedTuple):
    model: str
    version: str
    worker: str


class OutputFormatter:
    """The formatter of one stream: it turns printed bytes into lines for the log."""

    def __init__(
        self, stream: str, shape: OutputFormat, label: ModelLabel, ids: Ids, *, colour: bool = False
    ) -> None:
        self._stream = stream
        self._shape = shape
        self._label = label
        self._ids = ids
        self._colour = colour
        self._partial = b""
        self._decoder = codecs.getincrementaldecoder("utf-8")("backslashreplace")
        self._at_start = True

    def __call__(self, data: bytes) -> bytes:
        if self._shape == "json":
            return self._as_json(data)
        return self._as_text(self._decoder.decode(data))

    def _as_text(self, text: str) -> bytes:
        """Format output for a terminal, and escape its control characters.

        Line ends, and the carriage returns of progress bars, stay.
        """
        prefix, formatted = self._prefix(self._ids()), ""
        for match in _LINE.finditer(text):
            if match[0]:
                formatted += (prefix if self._at_start else "") + escaped(match[1]) + match[2]
                self._at_start = bool(match[2])
        return formatted.encode("utf-8", "backslashreplace")

    def format_record(self, text: str, ids: Sequence[str]) -> bytes:
        """Format a record of the log for a terminal; its first line has the ids."""
        line_end, self._at_start = "" if self._at_start else "\n", True
        lines = text.replace("\n", "\n" + self._prefix(()))
        return f"{line_end}{self._prefix(ids)}{lines}\n".encode("utf-8", "backslashreplace")

    def _prefix(self, ids: Sequence[str]) -> str:
        shown = ",".join(ids[:MAX_IDS]) + (f",+{len(ids) - MAX_IDS}" if len(ids) > MAX_IDS else "")
        prefix = f"{self._label.model} {self._label.version}{' ' if shown else ''}{shown} |"
        return f"\x1b[2m{prefix}\x1b[0m " if self._colour else f"{prefix} "

    def _as_json(self, data: bytes) -> bytes:
        *lines, self._partial = (self._partial + data).split(b"\n")
        if len(self._partial) > MAX_LINE_BYTES:
            lines.append(self._partial)
            self._partial = b""
        return b"".join(
            [
                self._json(str(piece, "utf-8", "replace"))
                for line in lines
                for piece in _pieces(line)
            ]
        )

    def _json(self, text: str) -> bytes:
        fields: dict[str, object] = {
            "stream": self._stream,
            **self._label._asdict(),
            "request_ids": list(self._ids())[:MAX_IDS],
        }
        return (
            json_line(time.time(), "info", "handler", text, fields).encode(
                "utf-8", "backslashreplace"
            )
            + b"\n"
        )


def _pieces(line: bytes) -> Iterator[bytes]:
    """Return the pieces of a line, of which a progress bar keeps only the last state."""
    line = line.rstrip(b"\r").rpartition(b"\r")[2]
    return (line[at : at + MAX_LINE_BYTES] for at in range(0, max(1, len(line)), MAX_LINE_BYTES))


class WorkerTextFormatter(logging.Formatter):
    """The format of the worker's log as text; control characters of quoted requests are escaped.

    With `outlines`, a failed request shows the model's own lines in place of Python's traceback.
    """

    def __init__(self, text: str = TEXT, *, outlines: bool = True) -> None:
        super().__init__(text)
        self._outlines = outlines

    def formatException(self, ei: Any) -> str:  # noqa: N802  # the name of logging
        return format_error(ei[1]).rstrip("\n") if ei[1] is not None else ""

    def format(self, record: logging.LogRecord) -> str:
        error = outlined_error(record)
        if error is None or not self._outlines:
            return escaped(super().format(record))
        record.message = record.getMessage()
        if self.usesTime():
            record.asctime = self.formatTime(record)
        return escaped(f"{self.formatMessage(record)}: {outline(error)}")


class WorkerJsonFormatter(JsonLines):
    def traceback_of(self, record: logging.LogRecord, error: BaseException) -> str:
        return format_error(error) if outlined_error(record) is None else outline(error)


def outlined_error(record: logging.LogRecord) -> BaseException | None:
    """Return the error of a record of tsx, which is shown as an outline.

    A record of the handler itself has a full traceback.
    """
    return record.exc_info[1] if record.exc_info and record.name.startswith("tsx.") else None


class WorkerLog(logging.Handler):
    """The worker's log, in which a record is one JSON object or labelled lines.

    The label is the model with its requests, or the level.
    """

    def __init__(self, shape: OutputFormat, label: ModelLabel, ids: Ids) -> None:
        super().__init__()
        self._shape = shape
        self._label = label
        self._ids = ids
        self._json = WorkerJsonFormatter()
        self.setFormatter(WorkerTextFormatter())
        # model_log.log has the form of TorchServe.
        self._message = WorkerTextFormatter("%(message)s", outlines=False)
        self._repeats = Repeats(self._put)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            if not self._repeats.hold(record):
                self._put(record)
        # Arguments that do not fit the message must not fail a request.
        except Exception:
            self.handleError(record)

    def flush(self) -> None:
        self._repeats.flush()

    def _put(self, record: logging.LogRecord) -> None:
        # TorchServe's workers log to stdout.
        stream = sys.stdout if self._shape == "marked" else sys.stderr
        raw, text = getattr(stream, "buffer", None), self.format(record)
        if not isinstance(raw, LossyOutput):
            stream.write(f"{text}\n")
        elif isinstance(raw.transform, OutputFormatter) and self._shape == "text":
            # A record with request ids names its requests itself.
            ids = () if hasattr(record, "request_ids") else self._ids()
            raw.write_line(raw.transform.format_record(text, ids), _encoded(text))
        else:
            raw.write_line(
                _encoded(self._as_json(record) if self._shape == "json" else self._marked(record)),
                _encoded(text),
            )

    def _as_json(self, record: logging.LogRecord) -> str:
        for name, value in (
            *self._label._asdict().items(),
            ("request_ids", list(self._ids())[:MAX_IDS]),
        ):
            if not hasattr(record, name):
                setattr(record, name, value)
        return self._json.format(record)

    def _marked(self, record: logging.LogRecord) -> str:
        return "\n".join(
            f"{LEVEL_MARK}{record.levelno}{LEVEL_MARK_END}{line}"
            for line in self._message.format(record).split("\n")
        )


def _encoded(text: str) -> bytes:
    return f"{text}\n".encode("utf-8", "backslashreplace")


def format_output(shape: OutputFormat, label: ModelLabel, ids: Ids) -> None:
    """Format the output of the whole process for good.

    A process that prints for several models, as in tests, is left unchanged.
    """
    formatted = False
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        raw = getattr(stream, "buffer", None)
        if isinstance(raw, LossyOutput):
            if shape != "marked":  # The name of the stream marks its lines.
                raw.transform = OutputFormatter(
                    name, shape, label, ids, colour=shape == "text" and has_colour(stream)
                )
            raw.report_loss = loss_line if shape == "json" else raw.report_loss
            formatted = True
    if formatted:
        root = logging.getLogger()
        root.handlers[:] = [
            WorkerLog(shape, label, ids) if type(handler) is logging.StreamHandler else handler
            for handler in root.handlers
        ]
