"""The files of one model's recording, limited in size and age; the oldest are removed first."""

from __future__ import annotations

import calendar
import itertools
import logging
import os
import time
from pathlib import Path
from typing import BinaryIO, NamedTuple

from tsx_archiver.storage.private_directory import private_directory
from tsx_runtime.recordings import SUFFIX, file_head

FILES_PER_RECORDING = 8  # One file, an eighth of the recording, is removed at a time.

logger = logging.getLogger("tsx.recording")


class StoredSize(NamedTuple):
    files: int
    size: int  # bytes
    oldest: float | None  # time.time() of the start of the oldest file


class Segments:
    """The files of a recording, which only this user may read.

    One thread uses an instance; others may read the attributes. The methods block, and raise
    OSError if the disk fails.

    Attributes:
        ended: The number of files that this instance has completed.
        size: The bytes of the file that is being written.
        begin_time: The `time.time()` at which this file was begun, or None if there is none.
    """

    def __init__(
        self,
        directory: Path,
        model: str,
        max_size: int,
        max_age: float,
        *,
        uploads: bool = False,
    ) -> None:
        """Use a directory; with `uploads`, the files are uploaded before they are removed."""
        self.directory = directory
        self.ended = 0
        self.size = 0
        self.begin_time: float | None = None
        self._model = model
        self._max_size = max_size
        self._max_age = max_age
        self._uploads = uploads
        self._out: BinaryIO | None = None
        self._path: Path | None = None

    def write(self, data: bytes, now: float) -> bool:
        """Write data, and tell whether it fits.

        Data of more than half the maximum size is refused, because it would displace most other
        requests.
        """
        if len(data) > self._max_size // 2:
            return False
        is_full = self.size + len(data) > self._max_size // FILES_PER_RECORDING
        if (
            self.begin_time is None
            or is_full
            or now - self.begin_time > self._max_age / FILES_PER_RECORDING
        ):
            self._begin(now, len(data))
        assert self._out is not None
        try:
            _write_all(self._out, data)
        except OSError:
            self._cut()
            raise
        self.size += len(data)
        return True

    def sweep(self, now: float, room: int = 0) -> None:
        """Remove files that are too old, and the oldest ones until `room` more bytes fit."""
        if self.begin_time is not None and now - self.begin_time > self._max_age:
            self.close()
        files = [(file, file.stat()) for file in self._files()]
        total = sum(status.st_size for _, status in files)
        for file, status in files:
            if status.st_mtime < now - self._max_age or total + room > self._max_size:
                if self._uploads and not _uploaded_mark(file).exists():
                    logger.warning("%s is removed, but was not uploaded to record_url", file)
                _remove(file)
                total -= status.st_size

    def ended_files(self, now: float, min_age: float) -> list[Path]:
        """Return the files to upload, after the current one has ended if it is old enough."""
        if self.begin_time is not None and now - self.begin_time >= min_age:
            self.close()
        return [
            file
            for file in self._files()
            if file != self._path and not _uploaded_mark(file).exists()
        ]

    def mark_uploaded(self, file: Path) -> None:
        """Note that a file need not be uploaded again, not even by the next server."""
        _uploaded_mark(file).touch(0o600)

    def stored_size(self) -> StoredSize:
        files = self._files()
        return StoredSize(
            len(files),
            sum(file.stat().st_size for file in files),
            _start_time(files[0]) if files else None,
        )

    def remove(self) -> None:
        self.close()
        for file in self._files():
            _remove(file)
        if self.directory.is_dir() and not any(self.directory.iterdir()):
            self.directory.rmdir()

    def close(self) -> None:
        out, self._out, self._path, self.begin_time = self._out, None, None, None
        if out is not None:
            self.ended += 1
            out.close()

    def _files(self) -> list[Path]:
        """Return the files, the oldest first."""
        return sorted(self.directory.glob(f"*{SUFFIX}"))

    def _begin(self, now: float, size: int) -> None:
        self.close()
        private_directory(self.directory)
        head = file_head(self._model)
        self.sweep(now, max(self._max_size // FILES_PER_RECORDING, len(head) + size))
        start_text = time.strftime("%Y%m%dT%H%M%S", time.gmtime(now))
        files = (
            self.directory / f"{start_text}-{number:06}{SUFFIX}" for number in itertools.count()
        )
        file = next(file for file in files if not file.exists())
        fd = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o600)
        out = open(fd, "wb", buffering=0)  # noqa: SIM115  # `close` closes it.
        try:
            _write_all(out, head)
        except OSError:
            out.close()
            raise
        self._out, self._path, self.size, self.begin_time = out, file, len(head), now

    def _cut(self) -> None:
        """Remove an incomplete entry after a failed write, so that the file stays readable."""
        assert self._out is not None
        try:
            self._out.truncate(self.size)
        except OSError:
            pass
        finally:
            self.close()


def _write_all(out: BinaryIO, data: bytes) -> None:
    remaining = memoryview(data)
    # A write may be partial, for example on a disk that is nearly full.
    while remaining:
        remaining = remaining[out.write(remaining) :]


def _uploaded_mark(file: Path) -> Path:
    return file.with_suffix(".uploaded")


def _remove(file: Path) -> None:
    _uploaded_mark(file).unlink(missing_ok=True)
    file.unlink(missing_ok=True)


def _start_time(file: Path) -> float | None:
    try:
        return float(calendar.timegm(time.strptime(file.name[:15], "%Y%m%dT%H%M%S")))
    except ValueError:
        return None
