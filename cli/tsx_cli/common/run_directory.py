"""The directory of a run that can be resumed: its journal, a line of JSON per result, and its results.json. One run at a time has it."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from tsx_archiver.storage.atomic_file import whole_file
from tsx_archiver.storage.locks import FileLock
from tsx_archiver.storage.private_directory import private_opener
from tsx_cli.common.failure import CliError, UsageError

NAME = "journal.jsonl"
RESULTS = "results.json"
Self = TypeVar("Self", bound="JournalFile")
Past = TypeVar("Past")
Options = TypeVar("Options")


class JournalFile:
    """Later lines take the place of earlier ones; a line that was cut short by the end of the process is passed over."""

    command = "tsx"  # that has such runs

    def __init__(self, directory: Path, *, new: bool = False) -> None:
        """Appends to the directory's journal, or begins it where the run is `new`. Raises CliError, also where another run has it."""
        self._path = directory / NAME
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._file = open(self._path, "a", encoding="utf-8", opener=private_opener)  # noqa: SIM115  # it is closed with the journal
        except OSError as error:
            raise CliError(f"'{directory}' cannot be written ({error.strerror}); name another directory with --output") from error
        self._lock = FileLock(self._path)
        if not self._lock.own(wait=False) or (new and has_run(directory)):
            self.close()
            raise CliError(
                f"another run of {self.command} writes into '{directory}'; wait until it ends, or name another directory with --output"
            )
        _cut(self._path, whole=not new)

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        with suppress(OSError):  # that it could not be written was reported
            self._file.close()
        self._lock.close()

    def write(self, kind: str, **entry: Any) -> None:
        """Raises CliError."""
        try:
            self._file.write(json.dumps({"kind": kind, **entry}, separators=(",", ":")) + "\n")
            self._file.flush()
        except OSError as error:
            message = f"'{self._path}' cannot be written ({error.strerror or error}), so the run ends here"
            raise CliError(f"{message}; free some disk space, and continue with {self.command} --resume {self._path.parent}") from error


def has_run(directory: Path) -> bool:
    """Whether there is anything to go on from: a run that found nothing, since its input was refused, is none."""
    try:
        with (directory / NAME).open("rb") as lines:
            return len(list(islice(lines, 2))) > 1
    except OSError:
        return False


@dataclass
class BegunRun:
    """The first line of a journal."""

    asked: dict[str, Any]
    sha256: str | None  # of the archive
    fingerprint: str  # of the machine
    started: str

    def given(self, directory: Path, options: Callable[..., Options]) -> tuple[Path, Options]:
        """The model and the options. Raises CliError."""
        try:
            found: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in self.asked.items()}
            return Path(found.pop("model")), options(**found)
        except (KeyError, TypeError, AttributeError, UsageError) as error:  # of another version of tsx
            raise CliError(f"--resume: what the run in '{directory}' was given cannot be read ({error}); start a new run") from error

    def check(self, model: Path, sha256: str | None, fingerprint: str) -> None:
        """Raises CliError where results of now cannot be combined with those of then."""
        if self.sha256 != sha256:
            raise CliError(f"--resume: {model} has changed since that run started; start a new run without --resume")
        if self.fingerprint != fingerprint:
            raise CliError(
                "--resume: the run was begun on another machine, whose figures cannot be combined with those of this machine; "
                "start a new run"
            )


def read_journal_file(directory: Path, command: str, read: Callable[[dict[str, Any], Past | None], Past]) -> Past:
    """`read` adds an entry to what the earlier ones have given, None before the first. Raises CliError where there is nothing to resume."""
    path = directory / NAME
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise CliError(f"--resume: '{path}' cannot be read ({error.strerror}); name the directory of a run of {command}") from error
    lines = text.removesuffix("\n").split("\n") if text else []  # and nowhere else: JSON may hold what str.splitlines takes for an end
    past: Past | None = None
    for number, line in enumerate(lines, 1):
        try:
            past = read(json.loads(line), past)
        except (ValueError, KeyError, TypeError, IndexError, ValidationError, RecursionError) as error:
            if number == len(lines) and past is not None:
                break
            raise CliError(f"'{path}', line {number}, is damaged ({type(error).__name__}); start a new run without --resume") from error
    if past is None:
        raise CliError(f"'{path}' is empty; start a new run without --resume")
    return past


def write_results(results: BaseModel, directory: Path) -> None:
    """Raises CliError."""
    try:
        directory.mkdir(parents=True, exist_ok=True)  # it may have been removed meanwhile
        with whole_file(directory / RESULTS) as file:
            file.write(results.model_dump_json(indent=1).encode() + b"\n")
    except OSError as error:
        raise CliError(f"'{directory / RESULTS}' cannot be written: {error.strerror or error}") from error


def _cut(path: Path, *, whole: bool) -> None:
    """Without a last line that has no end, or without any."""
    content = path.read_bytes()
    kept = content.rfind(b"\n") + 1 if whole else 0
    if kept < len(content):
        with path.open("r+b") as file:
            file.truncate(kept)
