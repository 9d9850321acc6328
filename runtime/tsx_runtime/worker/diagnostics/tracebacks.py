"""Tracebacks that quote only the model's own files.

Other files are not quoted, since a model could set a path or a link to any file that this process
can read. `format_error` returns Python's format for the API and the page. `outline` returns only
the frames of the model's files for the log.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import groupby
from pathlib import Path
from types import TracebackType

from tsx_archiver import is_inside
from tsx_runtime.worker.exceptions import MAX_MESSAGE_CHARS, shorten_and_escape
from tsx_runtime.worker.handler_api.modules import own_modules

MAX_TRACEBACK_CHARS = 4 * MAX_MESSAGE_CHARS
MAX_FOREIGN_FRAMES = 3  # frames of an error that has none in the model's files


def format_error(error: BaseException, tb: TracebackType | None = None) -> str:
    """Format the traceback of an error, or `tb` if given.

    Frames in files outside the model's directory are listed without their lines of code.
    """
    trace = traceback.TracebackException(
        type(error), error, tb or error.__traceback__, lookup_lines=False
    )
    is_quoted = cache(is_model_file)
    for _, exception in _iterate_exceptions(trace):
        exception.stack[:] = [
            (
                frame
                if is_quoted(frame.filename)
                else traceback.FrameSummary(frame.filename, frame.lineno, frame.name, line="")
            )
            for frame in exception.stack
        ]
        # A SyntaxError quotes the line as its `text`.
        if getattr(exception, "text", None) and not is_quoted(exception.filename):
            exception.text = None  # type: ignore[assignment]  # typeshed forgets None
    return shorten_and_escape("".join(trace.format()), MAX_TRACEBACK_CHARS)


def outline(error: BaseException) -> str:
    """Return the message and the model's frames of an error, then those of each cause.

    A frame has the form `handler.py:8 in handle: the line`.
    """
    trace = traceback.TracebackException(
        type(error), error, error.__traceback__, lookup_lines=False
    )
    is_quoted = cache(is_model_file)
    lines = [
        line
        for relation, exception in _iterate_exceptions(trace)
        for line in (relation + _format_message(exception), *_format_frames(exception, is_quoted))
    ]
    return shorten_and_escape("\n".join(lines), MAX_TRACEBACK_CHARS)


def is_model_file(file: str) -> bool:
    """Tell whether a file, with all links followed, belongs to the model of this process.

    A name such as `<frozen importlib._bootstrap>` is not a file.
    """
    return (
        own_modules.root is not None
        and Path(file).is_absolute()
        and is_inside(Path(file), own_modules.root)
    )


def _iterate_exceptions(
    trace: traceback.TracebackException,
) -> Iterator[tuple[str, traceback.TracebackException]]:
    """Yield an error, its causes and its group's members, each with a phrase for its relation."""
    pending: list[tuple[str, traceback.TracebackException | None]] = [("", trace)]
    visited_ids = set()
    while pending:
        relation, error = pending.pop(0)
        if error is not None and id(error) not in visited_ids:
            visited_ids.add(id(error))
            yield relation, error
            pending += [
                ("one of them is ", part) for part in getattr(error, "exceptions", None) or ()
            ]
            pending.append(("caused by ", error.__cause__))
            pending.append(
                (
                    "raised while handling ",
                    None if error.__suppress_context__ else error.__context__,
                )
            )


def _format_message(trace: traceback.TracebackException) -> str:
    lines = list(trace.format_exception_only())
    # The lines of a SyntaxError give its location first.
    return (lines[-1] if hasattr(trace, "msg") else "".join(lines)).strip()


def _format_frames(
    trace: traceback.TracebackException, is_quoted: Callable[[str], bool]
) -> Iterator[str]:
    model_frames = [frame for frame in trace.stack if is_quoted(frame.filename)]
    lines = [
        f"  {_format_location(frame, [str(own_modules.root)])} in {frame.name}: {frame.line}"
        for frame in model_frames
    ]
    syntax = getattr(trace, "text", None)
    if syntax and is_quoted(trace.filename):
        lines.append(
            f"  {os.path.relpath(trace.filename, own_modules.root)}:{trace.lineno}:"
            f" {syntax.strip()}"
        )
    if not lines:
        lines = [
            f"  {_format_location(frame, sys.path)} in {frame.name}"
            for frame in trace.stack[-MAX_FOREIGN_FRAMES:]
        ]
    for line, repeats in groupby(lines):
        count = sum(1 for _ in repeats)
        yield line if count == 1 else f"{line} ({count} times)"


def _format_location(frame: traceback.FrameSummary, roots: Sequence[str]) -> str:
    """Return a frame's file and line.

    The path is relative to the model's directory, or to the directory of installed modules.
    """
    prefix_length = max(
        (len(root) + 1 for root in roots if root and frame.filename.startswith(root + os.sep)),
        default=0,
    )
    return f"{frame.filename[prefix_length:]}:{frame.lineno}"
