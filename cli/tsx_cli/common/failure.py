"""The failure of a command: one message, an exit code, and a traceback with --debug only."""

from __future__ import annotations

import re
import sys
import traceback
from collections.abc import Callable, Iterable
from pathlib import PurePath
from typing import TextIO, TypeVar

from tsx_runtime.shared.log_format import escaped

FAILED = 1
USAGE = 2
INTERRUPTED = 130
HOW_TO_SEE_ALL = "--debug shows the whole traceback."
_FRAME = re.compile(
    r'^  File "(?P<file>[^"]+)", line (?P<line>\d+)[^\n]*(?:\n    (?P<code>[^\n]+))?', re.MULTILINE
)

Item = TypeVar("Item")
Result = TypeVar("Result")


class CliError(Exception):
    """An error whose message says what was wrong and what to do next."""

    exit_code = FAILED

    def __init__(self, message: str, *, traceback: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.traceback = traceback


class UsageError(CliError):
    """The command line itself is wrong, whatever the state of server and files."""

    exit_code = USAGE


def for_all(
    items: Iterable[Item], act: Callable[[Item], Result], *errors: type[Exception]
) -> list[Result]:
    """Call `act` for each item.

    Raises:
        CliError: It raised one of `errors` for some items; the message has a line for each.
    """
    results, messages = [], []
    for item in items:
        try:
            results.append(act(item))
        except errors as error:
            messages.append(str(error))
    if messages:
        raise CliError("\n".join(messages))
    return results


def report(error: BaseException, *, debug: bool, file: TextIO) -> int:
    """Print an error, and return the exit code.

    A text of several lines is one write, so that no line of a server's log comes within it.
    """
    if not _expected(error):
        file.write(_mark(f"Error: {type(error).__name__}: {error}", file) + "\n")
        if debug:
            traceback.print_exception(type(error), error, error.__traceback__, file=file)
        else:
            file.write("This is a bug in tsx; run again with --debug to see the traceback.\n")
        return FAILED
    message = getattr(error, "message", None) or _os_error(error)
    file.write(_mark(f"Error: {escaped(str(message))}", file) + "\n")
    worker_traceback: str | None = getattr(error, "traceback", None)
    if worker_traceback:
        lines = (
            worker_traceback if debug else getattr(error, "outline", "") or where(worker_traceback)
        )
        text = "\n".join(filter(None, [lines.rstrip(), "" if debug else HOW_TO_SEE_ALL]))
        file.write(escaped(text) + "\n")
    if debug:
        traceback.print_exception(type(error), error, error.__traceback__, file=file)
    return int(getattr(error, "exit_code", FAILED))


def where(text: str) -> str:
    """Return the last line of user code in a traceback."""
    # A worker's traceback has code for the model's own files only.
    frames = [match for match in _FRAME.finditer(text) if match["code"]]
    if not frames:
        return ""
    return (
        f"It was raised in {PurePath(frames[-1]['file']).name}, line {frames[-1]['line']}:"
        f" {frames[-1]['code'].strip()}"
    )


def _expected(error: BaseException) -> bool:
    # Only an imported module can have raised its error, and an import would be slow.
    trees = [("tsx_runtime.errors", "TsxError"), ("tsx_archiver", "ArchiveError")]
    known = [getattr(sys.modules[module], name) for module, name in trees if module in sys.modules]
    return isinstance(error, (CliError, OSError, *known))


def _os_error(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: '{error.filename}'" if error.filename else error.strerror
    return str(error)


def _mark(text: str, file: TextIO) -> str:
    return f"\033[31m{text}\033[0m" if file.isatty() else text
