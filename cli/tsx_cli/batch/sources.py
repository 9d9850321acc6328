"""The input files of the command line, on this machine or in S3.

Their order is fixed, and their number is not limited.
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

from tsx_cli.batch.s3 import RANGE_BYTES, S3, ObjectFile, is_s3
from tsx_cli.common.failure import CliError, UsageError

STDIN = "-"
FILES = "files"
BY_SUFFIX = {".jsonl": "jsonl", ".ndjson": "jsonl", ".csv": "csv", ".parquet": "parquet"}


class Source(NamedTuple):
    """A file. Its `tag` changes with its content: it is the modification time, or the ETag of S3."""

    name: str  # the name in the ids of rows
    url: str
    format: str
    size: int
    tag: str


class Sources:
    """The files of the inputs; they are listed again for each iteration to save memory.

    A file that is given itself contains rows if its suffix is in BY_SUFFIX. Each file of a given
    directory or S3 prefix is one row. `format` overrides both rules.
    """

    def __init__(self, inputs: Sequence[str], format: str | None, s3: S3) -> None:
        self._format, self._s3, self.stdin = format, s3, STDIN in inputs
        self._stdin_fd: int | None = None
        if self.stdin and (len(inputs) > 1 or format in (FILES, "parquet")):
            raise UsageError(
                "standard input (-) brings JSON lines or, with --input-format csv, CSV, and is the"
                " only input"
            )
        self._inputs = [
            address if address == STDIN or is_s3(address) else str(Path(address).absolute())
            for address in inputs
        ]
        if len(set(self._inputs)) < len(inputs):
            raise UsageError("an input is named twice; name each once")
        parents = [
            (
                _path(address)
                if address.endswith("/") or Path(address).is_dir()
                else str(Path(_path(address)).parent)
            )
            for address in self._inputs
        ]
        self._base = parents[0] if len(parents) == 1 else os.path.commonpath(parents)

    def __iter__(self) -> Iterator[Source]:
        if self.stdin:
            yield Source("stdin", STDIN, self._format or "jsonl", 0, "")
            return
        for address in self._inputs:
            for url, size, tag in (
                self._s3.listing(address) if is_s3(address) else _listing(address)
            ):
                name = (
                    str(PurePosixPath(_path(url)).relative_to(self._base))
                    .encode("utf-8", "backslashreplace")
                    .decode()
                )
                row_format = (
                    BY_SUFFIX.get(PurePosixPath(url).suffix.lower(), FILES)
                    if url == address
                    else FILES
                )
                yield Source(name, url, self._format or row_format, size, tag)

    def open(self, source: Source) -> BinaryIO:
        if source.url == STDIN:
            self._stdin_fd = os.dup(sys.stdin.fileno())
            return open(self._stdin_fd, "rb")
        if is_s3(source.url):
            return cast(
                BinaryIO,
                io.BufferedReader(
                    ObjectFile(self._s3, source.url, source.size, source.tag), RANGE_BYTES
                ),
            )
        return open(source.url, "rb")

    def end_stdin(self) -> None:
        """End a read of standard input that a signal handler has interrupted.

        The read returns as at the end of the input, so its last row may be cut off.
        """
        if self._stdin_fd is not None:
            null_fd = os.open(os.devnull, os.O_RDONLY)
            os.dup2(null_fd, self._stdin_fd)
            os.close(null_fd)

    def check_output(self, output: str) -> None:
        """Check that the output is not among the inputs.

        Raises:
            UsageError: Writing the output would change the inputs.
        """
        path, *inputs = (
            address if is_s3(address) else str(Path(address).resolve())
            for address in (output, *self._inputs)
        )
        if any(path == address or path.startswith(f"{address.rstrip('/')}/") for address in inputs):
            raise UsageError(
                f"-o {output} is among the inputs, which would change with it; name a place outside"
                " of them"
            )

    def survey(self) -> tuple[str, int, int, bool]:
        """Return a digest, the number of files, their total size, and whether each file is a row.

        The digest covers all names, sizes and tags.

        Raises:
            CliError: An input cannot be read.
        """
        digest, count, size, is_exact = hashlib.sha256(), 0, 0, True
        for source in self:
            digest.update(repr(source).encode())
            count, size, is_exact = (
                count + 1,
                size + source.size,
                is_exact and source.format == FILES,
            )
        return digest.hexdigest(), count, size, is_exact


def _path(url: str) -> str:
    return f"/{url.removeprefix('s3://')}" if is_s3(url) else url


def _listing(path: str) -> Iterator[tuple[str, int, str]]:
    """Yield a file, or the regular files of a directory except the hidden ones."""
    try:
        if not Path(path).is_dir():
            yield path, (status := Path(path).stat()).st_size, str(status.st_mtime_ns)
            return
        for root, folders, names in os.walk(path, onerror=_raise_unreadable):
            folders[:] = sorted(folder for folder in folders if not folder.startswith("."))
            for file in sorted(Path(root, name) for name in names if not name.startswith(".")):
                if stat.S_ISREG((status := file.stat()).st_mode):
                    yield str(file), status.st_size, str(status.st_mtime_ns)
    except OSError as error:
        _raise_unreadable(error)


def _raise_unreadable(error: OSError) -> None:
    raise CliError(f"the input '{error.filename}' cannot be read ({error.strerror})") from error
