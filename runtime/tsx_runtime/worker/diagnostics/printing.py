"""Adds to the lines that a handler prints or logs the model's name and the ids of the running
requests, or their level.
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
    MARK,
    MARK_END,
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

LONGEST = 64 << 10  # bytes of a line that is not complete yet
TEXT = "%(asctime)s %(levelname)-7s %(name)s (pid %(process)d): %(message)s"

_LINE = re.compile(r"([^\r\n]*)(\r\n|\r|\n|\Z)")

# For a terminal; for programs; for the front end, which writes model_log.log: there, lines of the
# log are marked with their level.
OutputFormat = Literal["text", "json", "marked"]
Ids = Callable[[], Sequence[str]]  # of the requests that run now


here: ContextVar[Context] = ContextVar("tsx_context")  # of a request that is a task of its own


class RunningIds:
    """The ids in the context, once there is one.

    In a thread of the handler's own they are those of the worker's batch.
    """

    context: Context | None = None

    def __call__(self) -> Sequence[str]:
        context = here.get(self.context)
        return () if context is None else context.running_ids()


class ModelLabel(NamedTuple):
    model: str
    version: str
    worker: str


class OutputFormatter:
    """Formats one stream: printed bytes in, lines for the log out."""

    def __init__(
        self, stream: str, shape: OutputFormat, label: ModelLabel, ids: Ids, *, colour: bool = False
    ) -> None:
        self._stream = stream
        self._shape = shape
        self._label = label
        self._ids = ids
        self._colour = colour
        self._begun = b""
        self._decoder = codecs.getincrementaldecoder("utf-8")("backslashreplace")
        self._at_start = True

    def __call__(self, data: bytes) -> bytes:
        if self._shape == "json":
            return self._as_json(data)
        return self._as_text(self._decoder.decode(data))

    def _as_text(self, text: str) -> bytes:
        """For a terminal: control characters are escaped, except line ends and the carriage returns
        of progress bars.
        """
        whose, formatted = self._prefix(self._ids()), ""
        for found in _LINE.finditer(text):
            if found[0]:
                formatted += (whose if self._at_start else "") + escaped(found[1]) + found[2]
                self._at_start = bool(found[2])
        return formatted.encode("utf-8", "backslashreplace")

    def whole_lines(self, text: str, ids: Sequence[str]) -> bytes:
        """A record of the log for a terminal: its first line has the ids."""
        begun, self._at_start = "" if self._at_start else "\n", True
        lines = text.replace("\n", "\n" + self._prefix(()))
        return f"{begun}{self._prefix(ids)}{lines}\n".encode("utf-8", "backslashreplace")

    def _prefix(self, ids: Sequence[str]) -> str:
        shown = ",".join(ids[:MAX_IDS]) + (f",+{len(ids) - MAX_IDS}" if len(ids) > MAX_IDS else "")
        words = f"{self._label.model} {self._label.version}{' ' if shown else ''}{shown} |"
        return f"\x1b[2m{words}\x1b[0m " if self._colour else f"{words} "

    def _as_json(self, data: bytes) -> bytes:
        """A progress bar rewrites one line; only its last state is kept."""
        *lines, self._begun = (self._begun + data).split(b"\n")
        if len(self._begun) > LONGEST:
            lines.append(self._begun)
            self._begun = b""
        return b"".join(
            [
                self._json(str(piece, "utf-8", "replace"))
                for line in lines
                for piece in _pieces(line)
            ]
        )

    def _json(self, text: str) -> bytes:
        more: dict[str, object] = {
            "stream": self._stream,
            **self._label._asdict(),
            "request_ids": list(self._ids())[:MAX_IDS],
        }
        return (
            json_line(time.time(), "info", "handler", text, more).encode(
                "utf-8", "backslashreplace"
            )
            + b"\n"
        )


def _pieces(line: bytes) -> Iterator[bytes]:
    """The last state of a progress bar; a line that is too long in several pieces."""
    line = line.rstrip(b"\r").rpartition(b"\r")[2]
    return (line[at : at + LONGEST] for at in range(0, max(1, len(line)), LONGEST))


class WorkerTextFormatter(logging.Formatter):
    """The worker's log as text, with control characters escaped, since it quotes requests.

    `outlines` shows a failed request by the model's own lines, and else by Python's traceback.
    """

    def __init__(self, text: str = TEXT, *, outlines: bool = True) -> None:
        super().__init__(text)
        self._outlines = outlines

    def formatException(self, ei: Any) -> str:  # noqa: N802  # logging's name
        return format_error(ei[1]).rstrip("\n") if ei[1] is not None else ""

    def format(self, record: logging.LogRecord) -> str:
        error = own_error(record)
        if error is None or not self._outlines:
            return escaped(super().format(record))
        record.message = record.getMessage()
        if self.usesTime():
            record.asctime = self.formatTime(record)
        return escaped(f"{self.formatMessage(record)}: {outline(error)}")


class WorkerJsonFormatter(JsonLines):
    def traceback_of(self, record: logging.LogRecord, error: BaseException) -> str:
        return format_error(error) if own_error(record) is None else outline(error)


def own_error(record: logging.LogRecord) -> BaseException | None:
    """The error of a record of tsx, which is shown as an outline.

    What a handler logs itself has the traceback that it asked for.
    """
    return record.exc_info[1] if record.exc_info and record.name.startswith("tsx.") else None


class WorkerLog(logging.Handler):
    """The worker's log: a record is one object in JSON, and else lines that say whose they are or
    their level.
    """

    def __init__(self, shape: OutputFormat, label: ModelLabel, ids: Ids) -> None:
        super().__init__()
        self._shape = shape
        self._label = label
        self._ids = ids
        self._json = WorkerJsonFormatter()
        self.setFormatter(WorkerTextFormatter())
        self._message = WorkerTextFormatter(
            "%(message)s", outlines=False
        )  # model_log.log has TorchServe's form
        self._repeats = Repeats(self._put)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            if not self._repeats.hold(record):
                self._put(record)
        # the boundary to the caller: arguments that do not fit the message are no reason to fail a
        # request
        except Exception:
            self.handleError(record)

    def flush(self) -> None:
        self._repeats.flush()

    def _put(self, record: logging.LogRecord) -> None:
        stream = (
            sys.stdout if self._shape == "marked" else sys.stderr
        )  # TorchServe's workers log to stdout
        raw, text = getattr(stream, "buffer", None), self.format(record)
        if not isinstance(raw, LossyOutput):
            stream.write(f"{text}\n")
        elif isinstance(raw.transform, OutputFormatter) and self._shape == "text":
            ids = (
                () if hasattr(record, "request_ids") else self._ids()
            )  # such a record names its requests itself
            raw.write_line(raw.transform.whole_lines(text, ids), _encoded(text))
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
            f"{MARK}{record.levelno}{MARK_END}{line}"
            for line in self._message.format(record).split("\n")
        )


def _encoded(text: str) -> bytes:
    return f"{text}\n".encode("utf-8", "backslashreplace")


def format_output(shape: OutputFormat, label: ModelLabel, ids: Ids) -> None:
    """Applies to the whole process for good.

    A process that prints for several models, as in tests, is left unchanged.
    """
    formatted = False
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        raw = getattr(stream, "buffer", None)
        if isinstance(raw, LossyOutput):
            if shape != "marked":  # there, the name of the stream says whose a line is
                raw.transform = OutputFormatter(
                    name, shape, label, ids, colour=shape == "text" and has_colour(stream)
                )
            raw.report_loss = loss_line if shape == "json" else raw.report_loss
            formatted = True
    if formatted:
        root = logging.getLogger()
        root.handlers[:] = [
            WorkerLog(shape, label, ids) if type(old) is logging.StreamHandler else old
            for old in root.handlers
        ]
