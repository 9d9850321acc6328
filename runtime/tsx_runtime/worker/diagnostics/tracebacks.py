"""Tracebacks that quote only the model's own files: a path or a link could name any file that this
process can read.

`format_error` is Python's own form, for the API and the page; `outline` is for the log, with the
frames of the model's files alone.
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

MOST = 4 * MAX_MESSAGE_CHARS  # characters of a traceback
INNERMOST = 3  # frames that are shown of an error that was raised by no code of the model's


def format_error(error: BaseException, tb: TracebackType | None = None) -> str:
    """The traceback, of `tb` if given.

    Of files outside the model's directory it names the lines and does not quote them.
    """
    trace = traceback.TracebackException(
        type(error), error, tb or error.__traceback__, lookup_lines=False
    )
    is_quoted = cache(is_own)
    for _, each in _chain(trace):
        each.stack[:] = [
            (
                frame
                if is_quoted(frame.filename)
                else traceback.FrameSummary(frame.filename, frame.lineno, frame.name, line="")
            )
            for frame in each.stack
        ]
        if getattr(each, "text", None) and not is_quoted(each.filename):  # of a SyntaxError
            each.text = None  # type: ignore[assignment]  # typeshed forgets that it may be
    return presentable("".join(trace.format()), MOST)


def outline(error: BaseException) -> str:
    """The error in words, then the model's own frames as `handler.py:8 in handle: its line`; then
    the same of what caused it.
    """
    trace = traceback.TracebackException(
        type(error), error, error.__traceback__, lookup_lines=False
    )
    is_quoted = cache(is_own)
    lines = [
        line
        for why, each in _chain(trace)
        for line in (why + _words(each), *_frames(each, is_quoted))
    ]
    return presentable("\n".join(lines), MOST)


def is_own(file: str) -> bool:
    """Whether it is a file of the model that this process serves, with all links followed.

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
    """It, what caused it, and the parts of a group of exceptions, each with the words before it."""
    waiting: list[tuple[str, traceback.TracebackException | None]] = [("", trace)]
    seen = set()
    while waiting:
        why, each = waiting.pop(0)
        if each is not None and id(each) not in seen:
            seen.add(id(each))
            yield why, each
            waiting += [
                ("one of them is ", part) for part in getattr(each, "exceptions", None) or ()
            ]
            waiting.append(("caused by ", each.__cause__))
            waiting.append(
                ("raised while handling ", None if each.__suppress_context__ else each.__context__)
            )


def _words(trace: traceback.TracebackException) -> str:
    lines = list(trace.format_exception_only())
    return (
        lines[-1] if hasattr(trace, "msg") else "".join(lines)
    ).strip()  # before its words, a SyntaxError has its place


def _frames(trace: traceback.TracebackException, is_quoted: Callable[[str], bool]) -> Iterator[str]:
    own = [frame for frame in trace.stack if is_quoted(frame.filename)]
    shown = [
        f"  {_place(frame, [str(own_modules.root)])} in {frame.name}: {frame.line}" for frame in own
    ]
    syntax = getattr(trace, "text", None)
    if syntax and is_quoted(trace.filename):
        shown.append(
            f"  {os.path.relpath(trace.filename, own_modules.root)}:{trace.lineno}:"
            f" {syntax.strip()}"
        )
    if not shown:
        shown = [
            f"  {_place(frame, sys.path)} in {frame.name}" for frame in trace.stack[-INNERMOST:]
        ]
    for line, same in groupby(shown):
        times = sum(1 for _ in same)
        yield line if times == 1 else f"{line} ({times} times)"


def _place(frame: traceback.FrameSummary, roots: Sequence[str]) -> str:
    """A file as code imports it: below the model's directory, or below that of installed
    modules.
    """
    above = max(
        (len(root) + 1 for root in roots if root and frame.filename.startswith(root + os.sep)),
        default=0,
    )
    return f"{frame.filename[above:]}:{frame.lineno}"
