"""Tracebacks that quote only the model's own files.

A path or a link could name any file that this process can read. `format_error` has Python's form,
for the API and the page. `outline` is for the log and shows only the frames of the model's files.
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
from tsx_runtime.worker.exceptions import MAX_MESSAGE_CHARS, presentable
from tsx_runtime.worker.handler_api.modules import own_modules

MAX_TRACEBACK_CHARS = 4 * MAX_MESSAGE_CHARS
MAX_FOREIGN_FRAMES = 3  # shown of an error outside the model's code


def format_error(error: BaseException, tb: TracebackType | None = None) -> str:
    """Return the traceback of an error, or `tb` if given.

    Lines of files outside the model's directory are named and not quoted.
    """
    trace = traceback.TracebackException(
        type(error), error, tb or error.__traceback__, lookup_lines=False
    )
    is_quoted = cache(is_model_file)
    for _, part in _chain(trace):
        part.stack[:] = [
            (
                frame
                if is_quoted(frame.filename)
                else traceback.FrameSummary(frame.filename, frame.lineno, frame.name, line="")
            )
            for frame in part.stack
        ]
        # A SyntaxError has a text.
        if getattr(part, "text", None) and not is_quoted(part.filename):
            part.text = None  # type: ignore[assignment]  # typeshed forgets None
    return presentable("".join(trace.format()), MAX_TRACEBACK_CHARS)


def outline(error: BaseException) -> str:
    """Return the error's message and the model's frames, then the same of each cause.

    A frame is `handler.py:8 in handle: the line`.
    """
    trace = traceback.TracebackException(
        type(error), error, error.__traceback__, lookup_lines=False
    )
    is_quoted = cache(is_model_file)
    lines = [
        line
        for relation, part in _chain(trace)
        for line in (relation + _message(part), *_frames(part, is_quoted))
    ]
    return presentable("\n".join(lines), MAX_TRACEBACK_CHARS)


def is_model_file(file: str) -> bool:
    """Tell whether a file belongs to the model of this process, with all links followed.

    `<frozen importlib._bootstrap>` is no file.
    """
    return (
        own_modules.root is not None
        and Path(file).is_absolute()
        and is_inside(Path(file), own_modules.root)
    )


def _chain(
    trace: traceback.TracebackException,
) -> Iterator[tuple[str, traceback.TracebackException]]:
    """Yield an error, its causes and the members of its group, each with its relation."""
    waiting: list[tuple[str, traceback.TracebackException | None]] = [("", trace)]
    seen = set()
    while waiting:
        relation, error = waiting.pop(0)
        if error is not None and id(error) not in seen:
            seen.add(id(error))
            yield relation, error
            waiting += [
                ("one of them is ", part) for part in getattr(error, "exceptions", None) or ()
            ]
            waiting.append(("caused by ", error.__cause__))
            waiting.append(
                (
                    "raised while handling ",
                    None if error.__suppress_context__ else error.__context__,
                )
            )


def _message(trace: traceback.TracebackException) -> str:
    lines = list(trace.format_exception_only())
    # A SyntaxError shows its location before its message.
    return (lines[-1] if hasattr(trace, "msg") else "".join(lines)).strip()


def _frames(trace: traceback.TracebackException, is_quoted: Callable[[str], bool]) -> Iterator[str]:
    model_frames = [frame for frame in trace.stack if is_quoted(frame.filename)]
    shown = [
        f"  {_location(frame, [str(own_modules.root)])} in {frame.name}: {frame.line}"
        for frame in model_frames
    ]
    syntax = getattr(trace, "text", None)
    if syntax and is_quoted(trace.filename):
        shown.append(
            f"  {os.path.relpath(trace.filename, own_modules.root)}:{trace.lineno}:"
            f" {syntax.strip()}"
        )
    if not shown:
        shown = [
            f"  {_location(frame, sys.path)} in {frame.name}"
            for frame in trace.stack[-MAX_FOREIGN_FRAMES:]
        ]
    for line, repeats in groupby(shown):
        times = sum(1 for _ in repeats)
        yield line if times == 1 else f"{line} ({times} times)"


def _location(frame: traceback.FrameSummary, roots: Sequence[str]) -> str:
    """Return a frame's file and line.

    The path is relative to the model's directory or to that of installed modules.
    """
    above = max(
        (len(root) + 1 for root in roots if root and frame.filename.startswith(root + os.sep)),
        default=0,
    )
    return f"{frame.filename[above:]}:{frame.lineno}"
