"""The directory of a run that can be resumed, with a journal and results.json.

Each result is a line of JSON in the journal. Only one run at a time may use the directory.
"""

from __future__ import annotations

import errno
import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from tsx_archiver.storage.atomic_file import write_atomically
from tsx_archiver.storage.locks import FileLock
from tsx_archiver.storage.private_directory import check_directory, is_trusted, private_opener
from tsx_cli.common.failure import CliError, UsageError

NAME = "journal.jsonl"
RESULTS = "results.json"
Self = TypeVar("Self", bound="JournalFile")
Past = TypeVar("Past")
Options = TypeVar("Options")


class JournalFile:
    """A journal. Later lines replace earlier ones, and an incomplete last line is ignored.

    Attributes:
        command: The command whose runs are recorded.
        format: The version of the format.
    """

    command = "tsx"
    format = 1

    def __init__(self, directory: Path, *, new: bool = False) -> None:
        """Open the journal of a directory for appending, or create it for a new run.

        Raises:
            CliError: The directory cannot be written, or another run uses it.
        """
        self._path, self._is_new = directory / NAME, new
        try:
            directory.mkdir(parents=True, exist_ok=True)
            if not is_trusted(directory.lstat()):
                raise PermissionError(errno.EACCES, "it belongs to another user")
            self._file = open(self._path, "a", encoding="utf-8", opener=private_opener)  # noqa: SIM115  # `close` closes it.
        except OSError as error:
            raise CliError(
                f"'{directory}' cannot be written ({error.strerror}); name another directory with"
                " --output"
            ) from error
        self._lock = FileLock(self._path)
        if not self._lock.lock_exclusive(wait=False) or (new and has_run(directory)):
            self.close()
            raise CliError(
                f"another run of {self.command} writes into '{directory}'; wait until it ends, or"
                " name another directory with --output"
            )
        _truncate(self._path, keep_lines=not new)

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        self.close()
        if self._is_new and kind is UsageError:  # The run cannot be resumed either.
            with suppress(OSError):  # The directory may have other files.
                self._path.unlink()
                self._path.parent.rmdir()

    def close(self) -> None:
        with suppress(OSError):  # `write` has already reported the error.
            self._file.close()
        self._lock.close()

    def begin(self, options: Any, model: Path, **entry: Any) -> None:
        """Write the first line, which `JournaledRun` reads; the options are a dataclass."""
        asked = asdict(options) | {"model": str(model.absolute())}
        self.write("begin", format=self.format, asked=asked, **entry)

    def write(self, kind: str, **entry: Any) -> None:
        """Append a line.

        Raises:
            CliError: The line cannot be written.
        """
        try:
            self._file.write(json.dumps({"kind": kind, **entry}, separators=(",", ":")) + "\n")
            self._file.flush()
        except OSError as error:
            message = (
                f"'{self._path}' cannot be written ({error.strerror or error}), so the run ends"
                " here"
            )
            raise CliError(
                f"{message}; free some disk space, and continue with {self.command} --resume"
                f" {self._path.parent}"
            ) from error


def new_directory(command: str, model: Path, output: Path | None) -> Path:
    """Return the directory of a new run of `tsx bench` or `tsx optimize`.

    It is `output`, or a directory named after the model and the time.

    Raises:
        UsageError: The directory already contains a run.
    """
    directory = output or Path(
        f"{command}-{model.name.removesuffix('.mar')}-{datetime.now():%Y%m%d-%H%M%S}"
    )
    if has_run(directory):
        raise UsageError(
            f"--output: '{directory}' holds a run already; --resume {directory} goes on with it, or"
            " name another directory"
        )
    return directory


def has_run(directory: Path) -> bool:
    """Tell whether the directory contains a run that can be resumed.

    If the input of a run was refused, its journal has only the first line.
    """
    try:
        with (directory / NAME).open("rb") as lines:
            return len(list(islice(lines, 2))) > 1
    except OSError:
        return False


@dataclass
class JournaledRun:
    """The content of a journal's first line.

    Attributes:
        asked: The model and the options.
        sha256: The checksum of the archive, or None.
        fingerprint: The fingerprint of the machine.
        started: The time of the start.
    """

    asked: dict[str, Any]
    sha256: str | None
    fingerprint: str
    started: str

    def arguments(self, directory: Path, options: Callable[..., Options]) -> tuple[Path, Options]:
        """Return the model and the options.

        Raises:
            CliError: Another version of tsx wrote the journal.
        """
        try:
            values: dict[str, Any] = {
                name: tuple(value) if isinstance(value, list) else value
                for name, value in self.asked.items()
            }
            return Path(values.pop("model")), options(**values)
        except (KeyError, TypeError, AttributeError, UsageError) as error:
            raise CliError(
                f"--resume: the options of the run in '{directory}' cannot be read ({error}); start"
                " a new run"
            ) from error

    def check(self, model: Path, sha256: str | None, fingerprint: str) -> None:
        """Check that new results can be combined with those of the run.

        Raises:
            CliError: The model or the machine has changed.
        """
        if self.sha256 != sha256:
            raise CliError(
                f"--resume: {model} has changed since that run started; start a new run without"
                " --resume"
            )
        if self.fingerprint != fingerprint:
            raise CliError(
                "--resume: the run started on another machine, whose figures cannot be combined"
                " with those of this one; start a new run"
            )


def read_journal_file(
    directory: Path,
    journal: type[JournalFile],
    begin: Callable[..., Past],
    add: Callable[[dict[str, Any], Past], None],
) -> Past:
    """Read a journal: `begin` makes a JournaledRun, and `add` adds each later entry to it.

    Raises CliError if there is nothing to resume.
    """
    path = directory / NAME
    try:
        check_directory(directory)  # A journal names files to load, so others must not write it.
        text = path.read_text(encoding="utf-8", errors="replace")
    except PermissionError as error:
        raise CliError(
            f"--resume: {error.strerror}; name the directory of a run of your own"
        ) from error
    except OSError as error:
        raise CliError(
            f"--resume: '{path}' cannot be read ({error.strerror}); name the directory of a run of"
            f" {journal.command}"
        ) from error
    # str.splitlines would also split at characters that JSON may contain, such as U+2028.
    lines = text.removesuffix("\n").split("\n") if text else []
    past: Past | None = None
    for number, line in enumerate(lines, 1):
        try:
            entry = json.loads(line)
            if past is not None:
                add(entry, past)
            elif entry["kind"] == "begin" and entry["format"] == journal.format:
                past = begin(
                    **{
                        name: value
                        for name, value in entry.items()
                        if name not in ("kind", "format")
                    }
                )
            else:
                raise ValueError(entry["kind"])
        except (
            ValueError,
            KeyError,
            TypeError,
            IndexError,
            ValidationError,
            RecursionError,
        ) as error:
            if number == len(lines) and past is not None:
                break
            raise CliError(
                f"'{path}', line {number}, is damaged ({type(error).__name__}); start a new run"
                " without --resume"
            ) from error
    if past is None:
        raise CliError(f"'{path}' is empty; start a new run without --resume")
    return past


def write_files(contents: Mapping[str, str], directory: Path) -> list[Path]:
    """Write files atomically, and return their paths.

    Raises:
        OSError: A file cannot be written.
    """
    for name, text in contents.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        with write_atomically(directory / name, durable=False) as file:
            file.write(text.encode())
    return [directory / name for name in contents]


def write_results(results: BaseModel, directory: Path) -> None:
    """Write results.json.

    Raises:
        CliError: The file cannot be written.
    """
    try:
        # The directory may have been removed during the run.
        directory.mkdir(parents=True, exist_ok=True)
        with write_atomically(directory / RESULTS) as file:
            file.write(results.model_dump_json(indent=1).encode() + b"\n")
    except OSError as error:
        raise CliError(
            f"'{directory / RESULTS}' cannot be written: {error.strerror or error}"
        ) from error


def _truncate(path: Path, *, keep_lines: bool) -> None:
    """Remove an incomplete last line, or all lines."""
    content = path.read_bytes()
    end = content.rfind(b"\n") + 1 if keep_lines else 0
    if end < len(content):
        with path.open("r+b") as file:
            file.truncate(end)
