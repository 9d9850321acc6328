"""Tracebacks that quote only the model's own files: a path or a link could name any file that this process can read."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import TracebackType

from tsx_archiver import is_inside
from tsx_runtime.worker.exceptions import LONGEST, presentable
from tsx_runtime.worker.handler_api.modules import own_modules

MOST = 4 * LONGEST  # characters of a traceback


def format_error(error: BaseException, tb: TracebackType | None = None) -> str:
    """The traceback, of `tb` if given. Of files outside the model's directory it names the lines and does not quote them."""
    trace = traceback.TracebackException(type(error), error, tb or error.__traceback__, lookup_lines=False)
    is_quoted = cache(is_own)
    for each in _all(trace):
        each.stack[:] = [
            frame if is_quoted(frame.filename) else traceback.FrameSummary(frame.filename, frame.lineno, frame.name, line="")
            for frame in each.stack
        ]
        if getattr(each, "text", None) and not is_quoted(each.filename):  # of a SyntaxError
            each.text = None  # type: ignore[assignment]  # typeshed forgets that it may be
    return presentable("".join(trace.format()), MOST)


def is_own(file: str) -> bool:
    """Whether it is a file of the model that this process serves, with all links followed."""
    return own_modules.root is not None and is_inside(Path(file), own_modules.root)


def _all(trace: traceback.TracebackException) -> Iterator[traceback.TracebackException]:
    """It, its causes, and those of a group of exceptions."""
    waiting: list[traceback.TracebackException | None] = [trace]
    seen = set()
    while waiting:
        each = waiting.pop()
        if each is not None and id(each) not in seen:
            seen.add(id(each))
            yield each
            waiting += [each.__cause__, each.__context__, *(getattr(each, "exceptions", None) or ())]
