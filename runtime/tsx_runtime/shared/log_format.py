"""The format of log lines: JSON for programs, or text with request id, model and version for
people.
"""

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

MOST_IDS = 64  # of one batch that a line names

# begins a line of a worker's log that goes to the front end with its level (a number of `logging`),
# which MARK_END ends
MARK = "\x1e"
MARK_END = "\x1f"

# What a record of the log may say of a request, by `extra`; and where workers are meant, of one of
# those.
ABOUT = ("model", "version", "worker", "request_id", "request_ids")


# What steers a terminal, or shows text in another order than it has, or is none (a byte of a file's
# name). Lines and tabs stay.
STEERS = re.compile(
    r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]|\r(?!\n)"
)


def escaped(text: str, characters: re.Pattern[str] = STEERS) -> str:
    """Text that a client or a handler wrote, safe to print at a terminal."""
    return characters.sub(
        lambda found: (
            f"\\x{ord(found[0]):02x}" if found[0] < "\u0100" else f"\\u{ord(found[0]):04x}"
        ),
        text,
    )


def rounded(value: float) -> str:
    """Write four digits, or as many as a whole number has: 12,345; 1,234; 123.4."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def escaped_json(text: str) -> str:
    """JSON as it may be shown at a terminal: the same value, in which such characters stand as
    \\u....
    """
    return STEERS.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def writes_json(log_format: str, *, in_files: bool, stream: TextIO | None = None) -> bool:
    """Whether the server's log is JSON.

    `auto`: where it goes to no terminal, and not to files (TorchServe's users know those).
    """
    if log_format != "auto":
        return log_format == "json"
    return not in_files and not is_terminal(stream or sys.stderr)


def is_terminal(stream: TextIO | None) -> bool:
    try:
        return stream is not None and stream.isatty()
    except ValueError:  # closed
        return False


def has_colour(stream: TextIO | None) -> bool:
    return (
        is_terminal(stream) and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    )


def json_line(
    at: float, level: str, logger: str, message: str, more: dict[str, object] | None = None
) -> str:
    """`at` is time.time(). What is not known is left out."""
    whole = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(at))
    line: dict[str, object] = {
        "time": f"{whole}.{int(at % 1 * 1000):03d}Z",
        "level": level,
        "logger": logger,
    }
    line |= {name: value for name, value in (more or {}).items() if value not in ("", None, [])}
    line["message"] = message
    return escaped_json(json.dumps(line, ensure_ascii=False, default=str))


def dropped(lost: int) -> bytes:
    """The line that stands for `lost` bytes of output."""
    text = f"{lost} bytes of output were dropped: no reader, or the disk was full"
    return json_line(time.time(), "warning", "tsx.output", text).encode() + b"\n"


class JsonLines(logging.Formatter):
    """One JSON object a line; a traceback is a field of it."""

    def format(self, record: logging.LogRecord) -> str:
        if getattr(record, "whole", False):
            text = record.getMessage()
            if getattr(record, "is_json", False):
                return text
            return "\n".join(
                json_line(record.created, "info", record.name, line) for line in text.splitlines()
            )
        more = self.about(record)
        if record.exc_info and record.exc_info[1] is not None:
            more["exception"] = redacted(self.traceback_of(record, record.exc_info[1]))
        return json_line(
            record.created, level_of(record), record.name, redacted(record.getMessage()), more
        )

    def traceback_of(self, record: logging.LogRecord, error: BaseException) -> str:
        return "".join(traceback.format_exception(error))

    def about(self, record: logging.LogRecord) -> dict[str, object]:
        return {name: getattr(record, name) for name in ABOUT if hasattr(record, name)}


def level_of(record: logging.LogRecord) -> str:
    return {"WARN": "warning"}.get(record.levelname, record.levelname.lower())


def about(record: logging.LogRecord, message: str) -> str:
    """What a line for people says of its request, behind its message and beyond it."""
    known = [
        (name, str(getattr(record, name, "") or "")) for name in ("model", "version", "request_id")
    ]
    fields = " ".join(f"{name}={value}" for name, value in known if value and value not in message)
    return f" [{fields}]" if fields else ""
