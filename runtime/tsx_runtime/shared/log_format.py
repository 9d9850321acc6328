"""The format of log lines: JSON, or text with the request id, model and version."""

from __future__ import annotations

import json
import logging
import os
import re
import sys
import time
import traceback
from typing import TextIO

from tsx_runtime.shared.redaction import redacted

MAX_IDS = 64  # request ids of a batch in one line

# A line that a worker sends to the front end begins with its level, a number of `logging`, between
# these markers.
LEVEL_MARK = "\x1e"
LEVEL_MARK_END = "\x1f"

# Attributes of a log record (from `extra`) that become fields of a JSON line.
EXTRA_FIELDS = ("model", "version", "worker", "request_id", "request_ids")


# Characters that control a terminal, reorder text, or stand for an undecodable byte. Newlines and
# tabs are safe.
UNSAFE = re.compile(
    r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]|\r(?!\n)"
)


def escaped(text: str, characters: re.Pattern[str] = UNSAFE) -> str:
    """Escape the text of a client or a handler, so that it is safe to print at a terminal."""
    return characters.sub(
        lambda match: (
            f"\\x{ord(match[0]):02x}" if match[0] < "\u0100" else f"\\u{ord(match[0]):04x}"
        ),
        text,
    )


def rounded(value: float) -> str:
    """Format a number with four digits, or all digits of a longer integer part: 123.4; 12,345."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def escaped_json(text: str) -> str:
    """Escape JSON without changing its value, so that it is safe to print at a terminal."""
    return UNSAFE.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def writes_json(log_format: str, *, in_files: bool, stream: TextIO | None = None) -> bool:
    """Tell whether the server's log is JSON.

    The format `auto` means JSON, except at a terminal and in log files: programs of TorchServe's
    users read these files.
    """
    if log_format != "auto":
        return log_format == "json"
    return not in_files and not is_terminal(stream or sys.stderr)


def is_terminal(stream: TextIO | None) -> bool:
    """Tell whether a stream is an open terminal."""
    try:
        return stream is not None and stream.isatty()
    except ValueError:  # The stream is closed.
        return False


def has_colour(stream: TextIO | None) -> bool:
    """Tell whether a stream is a terminal that may show colours."""
    return (
        is_terminal(stream) and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    )


def json_line(
    at: float, level: str, logger: str, message: str, extra: dict[str, object] | None = None
) -> str:
    """Format a log line as JSON.

    Args:
        at: The result of time.time().
        level: The name of the level, in lower case.
        logger: The name of the logger.
        message: The text of the line.
        extra: Further fields; empty ones are left out.
    """
    seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(at))
    line: dict[str, object] = {
        "time": f"{seconds}.{int(at % 1 * 1000):03d}Z",
        "level": level,
        "logger": logger,
    }
    line |= {name: value for name, value in (extra or {}).items() if value not in ("", None, [])}
    line["message"] = message
    return escaped_json(json.dumps(line, ensure_ascii=False, default=str))


def loss_line(lost_bytes: int) -> bytes:
    """Return the JSON line that reports lost bytes of output."""
    text = f"{lost_bytes} bytes of output were dropped: no reader, or the disk was full"
    return json_line(time.time(), "warning", "tsx.output", text).encode() + b"\n"


class JsonLines(logging.Formatter):
    """A formatter that writes one JSON object per line, with the traceback as a field."""

    def format(self, record: logging.LogRecord) -> str:
        """Format a record, or the lines of a `Logbook`."""
        if getattr(record, "whole", False):
            text = record.getMessage()
            if getattr(record, "is_json", False):
                return text
            return "\n".join(
                json_line(record.created, "info", record.name, line) for line in text.splitlines()
            )
        fields = self.fields_of(record)
        if record.exc_info and record.exc_info[1] is not None:
            fields["exception"] = redacted(self.traceback_of(record, record.exc_info[1]))
        return json_line(
            record.created, level_of(record), record.name, redacted(record.getMessage()), fields
        )

    def traceback_of(self, record: logging.LogRecord, error: BaseException) -> str:
        """Format the traceback of an error."""
        return "".join(traceback.format_exception(error))

    def fields_of(self, record: logging.LogRecord) -> dict[str, object]:
        """Return the extra fields of a record."""
        return {name: getattr(record, name) for name in EXTRA_FIELDS if hasattr(record, name)}


def level_of(record: logging.LogRecord) -> str:
    """Return the name of a record's level in lower case."""
    return {"WARN": "warning"}.get(record.levelname, record.levelname.lower())


def request_suffix(record: logging.LogRecord, message: str) -> str:
    """Return those of model, version and request id that a text line's message does not contain."""
    values = [
        (name, str(getattr(record, name, "") or "")) for name in ("model", "version", "request_id")
    ]
    fields = " ".join(f"{name}={value}" for name, value in values if value and value not in message)
    return f" [{fields}]" if fields else ""
