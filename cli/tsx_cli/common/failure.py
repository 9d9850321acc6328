"""The failure of a command: a single message, an exit code, and a traceback only with --debug."""

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
DEBUG_HINT = "--debug shows the whole traceback."
_FRAME = re.compile(
    r'^  File "(?P<file>[^"]+)", line (?P<line>\d+)[^\n]*(?:\n    (?P<code>[^\n]+))?', re.MULTILINE
)

Item = TypeVar("Item")
Result = TypeVar("Result")


class CliError(Exception):
    """An error. Its message says what was wrong and what to do next."""

    exit_code = FAILED

    def __init__(self, message: str, *, traceback: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.traceback = traceback


class UsageError(CliError):
    """An error in the command line itself, independent of servers and files."""

    exit_code = USAGE


def for_all(
    items: Iterable[Item], function: Callable[[Item], Result], *errors: type[Exception]
) -> list[Result]:
    """Call `function` for each item.

    Raises:
        CliError: `function` raised one of `errors` for some items; the message has a line for each.
    """
    results, messages = [], []
    for item in items:
        try:
            results.append(function(item))
        except errors as error:
            messages.append(str(error))
    if messages:
        raise CliError("\n".join(messages))
    return results


def report(error: BaseException, *, debug: bool, file: TextIO) -> int:
    """Print an error, and return the exit code.

    A text of several lines is written at once, so that lines of a server's log cannot divide it.
    """
    if not _is_expected(error):
        file.write(_in_red(f"Error: {type(error).__name__}: {error}", file) + "\n")
        if debug:
            traceback.print_exception(type(error), error, error.__traceback__, file=file)
        else:
            file.write("This is a bug in tsx; run again with --debug to see the traceback.\n")
        return FAILED
    message = getattr(error, "message", None) or _os_error(error)
    file.write(_in_red(f"Error: {escaped(str(message))}", file) + "\n")
    worker_traceback: str | None = getattr(error, "traceback", None)
    if worker_traceback:
        shown_traceback = (
            worker_traceback
            if debug
            else getattr(error, "outline", "") or user_code_text(worker_traceback)
        )
        text = "\n".join(filter(None, [shown_traceback.rstrip(), "" if debug else DEBUG_HINT]))
        file.write(escaped(text) + "\n")
    if debug:
        traceback.print_exception(type(error), error, error.__traceback__, file=file)
    return int(getattr(error, "exit_code", FAILED))


def user_code_text(text: str) -> str:
    """Return the last line of user code in a traceback."""
    # Only frames in the model's own files have a line of code in a worker's traceback.
    frames = [match for match in _FRAME.finditer(text) if match["code"]]
    if not frames:
        return ""
    return (
        f"It was raised in {PurePath(frames[-1]['file']).name}, line {frames[-1]['line']}:"
        f" {frames[-1]['code'].strip()}"
    )


def _is_expected(error: BaseException) -> bool:
    # Importing these modules would be slow, and a module that is not imported cannot have raised.
    error_bases = [("tsx_runtime.errors", "TsxError"), ("tsx_archiver", "ArchiveError")]
    expected_types = [
        getattr(sys.modules[module], name) for module, name in error_bases if module in sys.modules
    ]
    # The folder of a feature may be removed, and then a command that needs it says so.
    is_removed = str(getattr(error, "name", "")).startswith("tsx_runtime.features.")
    return is_removed or isinstance(error, (CliError, OSError, *expected_types))


def _os_error(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: '{error.filename}'" if error.filename else error.strerror
    return str(error)


def _in_red(text: str, file: TextIO) -> str:
    return f"\033[31m{text}\033[0m" if file.isatty() else text
