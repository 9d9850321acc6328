"""The files that the inputs of a command line name, here or in S3, in a fixed order, however many
they are.
"""

from __future__ import annotations

import hashlib
import io
import os
import stat
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import BinaryIO, NamedTuple, cast

from tsx_cli.batch.s3 import PIECE, S3, ObjectFile, is_s3
from tsx_cli.common.failure import CliError, UsageError

STDIN = "-"
FILES = "files"
BY_SUFFIX = {".jsonl": "jsonl", ".ndjson": "jsonl", ".csv": "csv", ".parquet": "parquet"}


class Source(NamedTuple):
    """`tag` changes with its content: the time of its last change, or S3's ETag."""

    name: str  # in ids
    url: str
    format: str
    size: int
    tag: str


class Sources:
    """Lists the files again each time, so that the memory does not grow with their number.

    A file that is named itself has rows where its name ends as in BY_SUFFIX. Of a directory, and
    below a prefix of S3, each file is a row. `format` says otherwise for all of them.
    """

    def __init__(self, inputs: Sequence[str], format: str | None, s3: S3) -> None:
        self._format, self._s3, self.stdin = format, s3, STDIN in inputs
        self._opened: int | None = None  # standard input
        if self.stdin and (len(inputs) > 1 or format in (FILES, "parquet")):
            raise UsageError(
                "standard input (-) brings JSON lines or, with --input-format csv, CSV, and is the"
                " only input"
            )
        self._inputs = [
            each if each == STDIN or is_s3(each) else str(Path(each).absolute()) for each in inputs
        ]
        if len(set(self._inputs)) < len(inputs):
            raise UsageError("an input is named twice; name each once")
        parents = [
            (
                _path(each)
                if each.endswith("/") or Path(each).is_dir()
                else str(Path(_path(each)).parent)
            )
            for each in self._inputs
        ]
        self._base = parents[0] if len(parents) == 1 else os.path.commonpath(parents)

    def __iter__(self) -> Iterator[Source]:
        if self.stdin:
            yield Source("stdin", STDIN, self._format or "jsonl", 0, "")
            return
        for each in self._inputs:
            for url, size, tag in self._s3.listing(each) if is_s3(each) else _listing(each):
                name = (
                    str(PurePosixPath(_path(url)).relative_to(self._base))
                    .encode("utf-8", "backslashreplace")
                    .decode()
                )
                own = (
                    BY_SUFFIX.get(PurePosixPath(url).suffix.lower(), FILES)
                    if url == each
                    else FILES
                )
                yield Source(name, url, self._format or own, size, tag)

    def open(self, source: Source) -> BinaryIO:
        if source.url == STDIN:
            self._opened = os.dup(sys.stdin.fileno())
            return open(self._opened, "rb")
        if is_s3(source.url):
            return cast(
                BinaryIO,
                io.BufferedReader(ObjectFile(self._s3, source.url, source.size, source.tag), PIECE),
            )
        return open(source.url, "rb")

    def end_stdin(self) -> None:
        """For a signal handler: a read of standard input that it has interrupted goes on, and
        ends.
        """
        if self._opened is not None:
            nothing = os.open(os.devnull, os.O_RDONLY)
            os.dup2(nothing, self._opened)
            os.close(nothing)

    def check_output(self, output: str) -> None:
        """Raises UsageError where it would be among the inputs, so that they change with it."""
        path, *inputs = (
            each if is_s3(each) else str(Path(each).resolve()) for each in (output, *self._inputs)
        )
        if any(path == each or path.startswith(f"{each.rstrip('/')}/") for each in inputs):
            raise UsageError(
                f"-o {output} is among the inputs, which would change with it; name a place outside"
                " of them"
            )

    def survey(self) -> tuple[str, int, int, bool]:
        """A digest of all names, sizes and tags; the number of files and of bytes; whether each
        file is a row. Raises CliError.
        """
        digest, count, size, whole = hashlib.sha256(), 0, 0, True
        for source in self:
            digest.update(repr(source).encode())
            count, size, whole = count + 1, size + source.size, whole and source.format == FILES
        return digest.hexdigest(), count, size, whole


def _path(url: str) -> str:
    return f"/{url.removeprefix('s3://')}" if is_s3(url) else url


def _listing(path: str) -> Iterator[tuple[str, int, str]]:
    """Of a directory the regular files; hidden ones are left out, as shells do."""
    try:
        if not Path(path).is_dir():
            yield path, (found := Path(path).stat()).st_size, str(found.st_mtime_ns)
            return
        for root, folders, names in os.walk(path, onerror=_refuse):
            folders[:] = sorted(folder for folder in folders if not folder.startswith("."))
            for file in sorted(Path(root, name) for name in names if not name.startswith(".")):
                if stat.S_ISREG((found := file.stat()).st_mode):
                    yield str(file), found.st_size, str(found.st_mtime_ns)
    except OSError as error:
        _refuse(error)


def _refuse(error: OSError) -> None:
    raise CliError(f"the input '{error.filename}' cannot be read ({error.strerror})") from error
