"""Adds the model's name and the ids of the running requests to the lines that a handler prints or logs."""

from __future__ import annotations

import codecs
import logging
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any, Literal, NamedTuple

from tsx_runtime.shared.log_format import MARK, MARK_END, MOST_IDS, JsonLines, dropped, escaped, has_colour, json_line
from tsx_runtime.shared.nonblocking_output import LossyOutput
from tsx_runtime.worker.diagnostics.tracebacks import format_error
from tsx_runtime.worker.handler_api.context import Context

LONGEST = 64 << 10  # bytes of a line that is not complete yet
TEXT = "%(asctime)s %(levelname)-7s %(name)s (pid %(process)d): %(message)s"

_LINE = re.compile(r"([^\r\n]*)(\r\n|\r|\n|\Z)")

OutputFormat = Literal["text", "json", "marked"]  # for a terminal; for programs; for the front end, which writes model_log.log
Ids = Callable[[], Sequence[str]]  # of the requests that run now


here: ContextVar[Context] = ContextVar("tsx_context")  # of a request that is a task of its own


class RunningIds:
    """The ids in the context, once there is one. In a thread of the handler's own they are those of the worker's batch."""

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

    def __init__(self, stream: str, shape: OutputFormat, label: ModelLabel, ids: Ids, *, colour: bool = False) -> None:
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
        if self._shape == "text":
            return self._as_text(self._decoder.decode(data))
        prefix = self._prefix()
        if not prefix:
            return data
        *lines, rest = data.split(b"\n")
        formatted = b"".join(((prefix if self._at_start or at else b"") + line + b"\n") for at, line in enumerate(lines))
        if rest:
            formatted += (prefix if lines or self._at_start else b"") + rest
        self._at_start = not rest
        return formatted

    def _as_text(self, text: str) -> bytes:
        """For a terminal: control characters are escaped, except line ends and the carriage returns of progress bars."""
        prefix, formatted = self._prefix().decode(), ""
        for found in _LINE.finditer(text):
            if found[0]:
                formatted += (prefix if self._at_start else "") + escaped(found[1]) + found[2]
                self._at_start = bool(found[2])
        return formatted.encode("utf-8", "backslashreplace")

    def _as_json(self, data: bytes) -> bytes:
        """A progress bar rewrites one line; only its last state is kept."""
        *lines, self._begun = (self._begun + data).split(b"\n")
        if len(self._begun) > LONGEST:
            lines.append(self._begun)
            self._begun = b""
        return b"".join([self._json(str(piece, "utf-8", "replace")) for line in lines for piece in _pieces(line)])

    def _json(self, text: str) -> bytes:
        more: dict[str, object] = {"stream": self._stream, **self._label._asdict(), "request_ids": list(self._ids())[:MOST_IDS]}
        return json_line(time.time(), "info", "handler", text, more).encode("utf-8", "backslashreplace") + b"\n"

    def _prefix(self) -> bytes:
        ids = self._ids()
        shown = ",".join(ids[:MOST_IDS]) + (f",+{len(ids) - MOST_IDS}" if len(ids) > MOST_IDS else "")
        if self._shape == "marked":
            return f"{MARK}{shown}{MARK_END}".encode() if ids else b""
        words = f"{self._label.model} {self._label.version}{' ' if shown else ''}{shown} |"
        return (f"\x1b[2m{words}\x1b[0m " if self._colour else f"{words} ").encode()


def _pieces(line: bytes) -> Iterator[bytes]:
    """The last state of a progress bar; a line that is too long in several pieces."""
    line = line.rstrip(b"\r").rpartition(b"\r")[2]
    return (line[at : at + LONGEST] for at in range(0, max(1, len(line)), LONGEST))


class WorkerTextFormatter(logging.Formatter):
    """The worker's log as text, with control characters escaped, since it quotes requests."""

    def __init__(self) -> None:
        super().__init__(TEXT)

    def formatException(self, ei: Any) -> str:  # noqa: N802  # logging's name
        return format_error(ei[1]).rstrip("\n") if ei[1] is not None else ""

    def format(self, record: logging.LogRecord) -> str:
        return escaped(super().format(record))


class WorkerJsonFormatter(JsonLines):
    def traceback_of(self, error: BaseException) -> str:
        return format_error(error)


class JsonLog(logging.Handler):
    """The worker's log where it is JSON: a record is one object, and not the lines of a text."""

    def __init__(self, label: ModelLabel, ids: Ids) -> None:
        super().__init__()
        self._label = label
        self._ids = ids
        self._json = WorkerJsonFormatter()
        self._text = WorkerTextFormatter()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._put(record)
        except Exception:  # the boundary to the caller: arguments that do not fit the message are no reason to fail a request
            self.handleError(record)

    def _put(self, record: logging.LogRecord) -> None:
        for name, value in (*self._label._asdict().items(), ("request_ids", list(self._ids())[:MOST_IDS])):
            if not hasattr(record, name):
                setattr(record, name, value)
        raw = getattr(sys.stderr, "buffer", None)
        text = self._text.format(record) + "\n"
        if isinstance(raw, LossyOutput):
            raw.put_line(self._json.format(record).encode("utf-8", "backslashreplace") + b"\n", text.encode("utf-8", "backslashreplace"))
        else:
            sys.stderr.write(text)


def format_output(shape: OutputFormat, label: ModelLabel, ids: Ids) -> None:
    """Applies to the whole process for good. A process that prints for several models, as in tests, is left unchanged."""
    formatted = False
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        raw = getattr(stream, "buffer", None)
        if isinstance(raw, LossyOutput):
            raw.dress = OutputFormatter(name, shape, label, ids, colour=shape == "text" and has_colour(stream))
            raw.notice = dropped if shape == "json" else raw.notice
            formatted = True
    if formatted and shape == "json":
        root = logging.getLogger()
        root.handlers[:] = [JsonLog(label, ids) if type(old) is logging.StreamHandler else old for old in root.handlers]
