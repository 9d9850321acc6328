"""The files of one model's recording: of limited size and age; the oldest is removed to make
room.
"""

from __future__ import annotations

import calendar
import itertools
import os
import time
from pathlib import Path
from typing import BinaryIO, NamedTuple

from tsx_archiver.storage.private_directory import private_directory
from tsx_runtime.recordings import SUFFIX, file_head

PARTS = 8  # files that share out what may be kept: so much of it goes at a time


class StoredSize(NamedTuple):
    files: int
    size: int  # bytes
    oldest: float | None  # time.time() when the oldest file was begun


class Segments:
    """Blocking, for one thread. Only this user may read the files. Raises OSError."""

    def __init__(self, directory: Path, model: str, max_size: int, max_age: float) -> None:
        self.directory = directory
        self._model = model
        self._max_size = max_size
        self._max_age = max_age
        self._out: BinaryIO | None = None
        self._size = 0
        self._began = 0.0

    def write(self, data: bytes, now: float) -> bool:
        """Whether it may be kept: one request alone is not to push all others out."""
        if len(data) > self._max_size // 2:
            return False
        full = self._size + len(data) > self._max_size // PARTS
        if self._out is None or full or now - self._began > self._max_age / PARTS:
            self._begin(now, len(data))
        assert self._out is not None
        try:
            _write_whole(self._out, data)
        except OSError:
            self._cut()
            raise
        self._size += len(data)
        return True

    def sweep(self, now: float, room: int = 0) -> None:
        """Remove what is too old, and the oldest until there is room for so many bytes more."""
        if self._out is not None and now - self._began > self._max_age:
            self.close()
        files = [(file, file.stat()) for file in self._files()]
        total = sum(about.st_size for _, about in files)
        for file, about in files:
            if about.st_mtime < now - self._max_age or total + room > self._max_size:
                file.unlink(missing_ok=True)
                total -= about.st_size

    def kept(self) -> StoredSize:
        files = self._files()
        return StoredSize(
            len(files),
            sum(file.stat().st_size for file in files),
            _began(files[0]) if files else None,
        )

    def remove(self) -> None:
        self.close()
        for file in self._files():
            file.unlink(missing_ok=True)
        if self.directory.is_dir() and not any(self.directory.iterdir()):
            self.directory.rmdir()

    def close(self) -> None:
        out, self._out = self._out, None
        if out is not None:
            out.close()

    def _files(self) -> list[Path]:
        """The oldest first."""
        return sorted(self.directory.glob(f"*{SUFFIX}"))

    def _begin(self, now: float, size: int) -> None:
        self.close()
        private_directory(self.directory)
        head = file_head(self._model)
        self.sweep(now, max(self._max_size // PARTS, len(head) + size))
        began = time.strftime("%Y%m%dT%H%M%S", time.gmtime(now))
        files = (self.directory / f"{began}-{number:06}{SUFFIX}" for number in itertools.count())
        file = next(file for file in files if not file.exists())
        fd = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o600)
        out = open(fd, "wb", buffering=0)  # noqa: SIM115  # it is closed with the segment
        try:
            _write_whole(out, head)
        except OSError:
            out.close()
            raise
        self._out, self._size, self._began = out, len(head), now

    def _cut(self) -> None:
        """The disk is full, or gone: what did not come whole is taken off, so that what comes later
        can be read.
        """
        assert self._out is not None
        try:
            self._out.truncate(self._size)
        except OSError:
            pass
        finally:
            self.close()


def _write_whole(out: BinaryIO, data: bytes) -> None:
    left = memoryview(data)
    while left:  # a disk that is nearly full takes a part
        left = left[out.write(left) :]


def _began(file: Path) -> float | None:
    try:
        return float(calendar.timegm(time.strptime(file.name[:15], "%Y%m%dT%H%M%S")))
    except ValueError:
        return None
