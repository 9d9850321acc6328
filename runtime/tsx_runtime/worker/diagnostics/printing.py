"""The format of the lines that a handler prints or logs.

Lines begin with the model's name and the ids of the running requests, or with their level.
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
from tsx_runtime.worker.diagnostics.failures import RepeatFilter
from tsx_runtime.worker.diagnostics.tracebacks import format_error, outline
from tsx_runtime.worker.handler_api.context import Context

MAX_LINE_BYTES = 64 << 10  # Longer lines are split.
TEXT_FORMAT = "%(asctime)s %(levelname)-7s %(name)s (pid %(process)d): %(message)s"

_LINE_PATTERN = re.compile(r"([^\r\n]*)(\r\n|\r|\n|\Z)")

# Text is for a terminal, JSON for programs. Marked lines, which carry their log level, are for the
# front end, which writes them to model_log.log.
OutputFormat = Literal["text", "json", "marked"]
GetRequestIds = Callable[[], Sequence[str]]  # returns the ids of the running requests


# The context of a request that runs in its own task.
task_context: ContextVar[Context] = ContextVar("tsx_context")


class RunningIds:
    """A function that returns the ids of the running requests; none until the model is loaded.

    In a thread that the handler has started, these are the ids of the worker's whole batch.
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
    """A formatter that turns the bytes printed to one stream into lines of the log."""

    def __init__(
        self,
        stream: str,
        output_format: OutputFormat,
        label: ModelLabel,
        ids: GetRequestIds,
        *,
        colour: bool = False,
    ) -> None:
        self._stream = stream
        self._output_format = output_format
        self._label = label
        self._get_ids = ids
        self._colour = colour
        self._partial = b""
        self._decoder = codecs.getincrementaldecoder("utf-8")("backslashreplace")
        self._is_at_line_start = True

    def __call__(self, data: bytes) -> bytes:
        if self._output_format == "json":
            return self._as_json(data)
        return self._as_text(self._decoder.decode(data))

    def _as_text(self, text: str) -> bytes:
        """Format output for a terminal, and escape its control characters.

        Line ends, and the carriage returns of progress bars, are kept.
        """
        prefix, formatted = self._prefix(self._get_ids()), ""
        for match in _LINE_PATTERN.finditer(text):
            if match[0]:
                formatted += (
                    (prefix if self._is_at_line_start else "") + escaped(match[1]) + match[2]
                )
                self._is_at_line_start = bool(match[2])
        return formatted.encode("utf-8", "backslashreplace")

    def format_record(self, text: str, ids: Sequence[str]) -> bytes:
        """Format a log record for a terminal; only its first line begins with the ids."""
        line_end, self._is_at_line_start = "" if self._is_at_line_start else "\n", True
        lines = text.replace("\n", "\n" + self._prefix(()))
        return f"{line_end}{self._prefix(ids)}{lines}\n".encode("utf-8", "backslashreplace")

    def _prefix(self, ids: Sequence[str]) -> str:
        id_list = ",".join(ids[:MAX_IDS]) + (
            f",+{len(ids) - MAX_IDS}" if len(ids) > MAX_IDS else ""
        )
        prefix = f"{self._label.model} {self._label.version}{' ' if id_list else ''}{id_list} |"
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
                for piece in _split_line(line)
            ]
        )

    def _json(self, text: str) -> bytes:
        fields: dict[str, object] = {
            "stream": self._stream,
            **self._label._asdict(),
            "request_ids": list(self._get_ids())[:MAX_IDS],
        }
        return (
            json_line(time.time(), "info", "handler", text, fields).encode(
                "utf-8", "backslashreplace"
            )
            + b"\n"
        )


def _split_line(line: bytes) -> Iterator[bytes]:
    """Split a long line. Of a progress bar, only the last state is returned."""
    line = line.rstrip(b"\r").rpartition(b"\r")[2]
    return (
        line[start : start + MAX_LINE_BYTES]
        for start in range(0, max(1, len(line)), MAX_LINE_BYTES)
    )


class WorkerTextFormatter(logging.Formatter):
    """A formatter of the worker's log as text, which escapes control characters of quoted requests.

    With `outlines`, the log shows only the model's frames of an error, not Python's traceback.
    """

    def __init__(self, text_format: str = TEXT_FORMAT, *, outlines: bool = True) -> None:
        super().__init__(text_format)
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
    """Return the error if tsx has logged it, so that it is shown as an outline.

    An error that the handler itself has logged is shown with a full traceback.
    """
    return record.exc_info[1] if record.exc_info and record.name.startswith("tsx.") else None


class WorkerLog(logging.Handler):
    """A log handler that writes each record as one JSON object or as labelled lines.

    The label is the model and its running requests, or the level.
    """

    def __init__(self, output_format: OutputFormat, label: ModelLabel, ids: GetRequestIds) -> None:
        super().__init__()
        self._output_format = output_format
        self._label = label
        self._get_ids = ids
        self._json = WorkerJsonFormatter()
        self.setFormatter(WorkerTextFormatter())
        # The lines of model_log.log look as in TorchServe.
        self._message = WorkerTextFormatter("%(message)s", outlines=False)
        self._repeats = RepeatFilter(self._put)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            if not self._repeats.hold(record):
                self._put(record)
        # If the arguments of a message do not fit it, the request must not fail.
        except Exception:
            self.handleError(record)

    def flush(self) -> None:
        self._repeats.flush()

    def _put(self, record: logging.LogRecord) -> None:
        # TorchServe's workers log to stdout.
        stream = sys.stdout if self._output_format == "marked" else sys.stderr
        raw, text = getattr(stream, "buffer", None), self.format(record)
        if not isinstance(raw, LossyOutput):
            stream.write(f"{text}\n")
        elif isinstance(raw.transform, OutputFormatter) and self._output_format == "text":
            # A message about requests already names them.
            ids = () if hasattr(record, "request_ids") else self._get_ids()
            raw.write_line(raw.transform.format_record(text, ids), _encode_line(text))
        else:
            raw.write_line(
                _encode_line(
                    self._as_json(record) if self._output_format == "json" else self._marked(record)
                ),
                _encode_line(text),
            )

    def _as_json(self, record: logging.LogRecord) -> str:
        for name, value in (
            *self._label._asdict().items(),
            ("request_ids", list(self._get_ids())[:MAX_IDS]),
        ):
            if not hasattr(record, name):
                setattr(record, name, value)
        return self._json.format(record)

    def _marked(self, record: logging.LogRecord) -> str:
        return "\n".join(
            f"{LEVEL_MARK}{record.levelno}{LEVEL_MARK_END}{line}"
            for line in self._message.format(record).split("\n")
        )


def _encode_line(text: str) -> bytes:
    return f"{text}\n".encode("utf-8", "backslashreplace")


def format_output(output_format: OutputFormat, label: ModelLabel, ids: GetRequestIds) -> None:
    """Format all output of this process from now on.

    If stdout and stderr have no `LossyOutput`, as in tests, nothing changes.
    """
    is_formatted = False
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        raw = getattr(stream, "buffer", None)
        if isinstance(raw, LossyOutput):
            if output_format != "marked":  # The front end labels these lines by their stream.
                raw.transform = OutputFormatter(
                    name,
                    output_format,
                    label,
                    ids,
                    colour=output_format == "text" and has_colour(stream),
                )
            raw.report_loss = loss_line if output_format == "json" else raw.report_loss
            is_formatted = True
    if is_formatted:
        root = logging.getLogger()
        root.handlers[:] = [
            WorkerLog(output_format, label, ids)
            if type(handler) is logging.StreamHandler
            else handler
            for handler in root.handlers
        ]
