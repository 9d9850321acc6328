"""A log file of whole lines, rotated by size, and created again if it was moved or deleted."""

from __future__ import annotations

import errno
import logging
import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from tsx_archiver.storage.private_directory import check_directory, is_trusted

# seconds between two messages about lost lines: a disk that is nearly full takes some lines and not
# others
CALM = 10.0

logger = logging.getLogger("tsx.server")


class LogFile(logging.Handler):
    """For one thread, the one that writes the log.

    No other program appends to the file while the server runs.

    `path.1` to `path.KEPT` are older ones, the newest first. What cannot be written is lost, which
    the server's log says once.
    """

    def __init__(
        self, path: Path, max_bytes: int, kept: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Raises OSError where the file cannot be made."""
        super().__init__()
        self.path = path
        self._max_bytes = max_bytes
        self._kept = kept
        self._fd = _open(path)
        self._clock = clock
        self._lost = 0  # lines, since that was logged
        self._logged_at = 0.0  # when it was

    def emit(self, record: logging.LogRecord) -> None:
        try:
            lines = self.format(record) + "\n"
        except Exception:  # the boundary to the caller: its arguments may not fit its message
            self.handleError(record)
            return
        try:
            self._write(lines.encode("utf-8", "backslashreplace"))
        except OSError as error:
            self._lose(lines.count("\n"), error)
            return
        if self._lost and self._clock() - self._logged_at >= CALM:
            lost, self._lost = self._lost, 0
            logger.warning("%s can be written again; %d lines were lost", self.path, lost)

    def close(self) -> None:
        with suppress(OSError):
            os.close(self._fd)
        self._fd = -1
        super().close()

    def _write(self, data: bytes) -> None:
        self._find_again()
        size = os.fstat(self._fd).st_size
        if 0 < self._max_bytes < size + len(data) and size:
            self._roll_over()
            size = os.fstat(self._fd).st_size
        view = memoryview(data)
        try:
            while view:
                view = view[os.write(self._fd, view) :]
        except OSError:
            os.ftruncate(
                self._fd, size
            )  # a full disk has taken a part: half a line would spoil the next one
            raise

    def _find_again(self) -> None:
        """A file that was moved or deleted is not written any more: the log continues under its own
        name.
        """
        try:
            found, ours = self.path.stat(), os.fstat(self._fd)
            if (found.st_dev, found.st_ino) == (ours.st_dev, ours.st_ino):
                return
        except FileNotFoundError:
            pass
        try:
            self._begin()
        except OSError:
            if not os.fstat(self._fd).st_nlink:
                raise
            # a moved file still gets the lines while no new file can be made

    def _begin(self) -> None:
        fd = _open(self.path)
        os.close(self._fd)
        self._fd = fd

    def _roll_over(self) -> None:
        """Where files cannot be renamed, this one goes on growing."""
        names = [
            self.path,
            *(
                self.path.with_name(f"{self.path.name}.{number}")
                for number in range(1, self._kept + 1)
            ),
        ]
        with suppress(OSError):
            for older, newer in zip(reversed(names), reversed(names[:-1]), strict=False):
                if newer.exists():
                    newer.replace(older)
            self.path.unlink(missing_ok=True)  # where none is kept
            self._begin()

    def _lose(self, lines: int, error: OSError) -> None:
        if not self._lost:
            self._logged_at = self._clock()
            logger.error(
                "%s cannot be written, so its lines are lost until it can: %s",
                self.path,
                error.strerror,
            )
        self._lost += lines


def _open(path: Path) -> int:
    """Through a symbolic link (to /dev/stdout, say) only where no other user can have made it, or
    can change it.
    """
    _make_directories(path.parent)
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | getattr(os, "O_CLOEXEC", 0)
    try:
        return os.open(path, flags | getattr(os, "O_NOFOLLOW", 0), 0o644)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
    check_directory(path.parent, allow_sticky=True)
    if not is_trusted(path.lstat()):
        raise PermissionError(errno.EACCES, "it is a symbolic link of another user", str(path))
    return os.open(path, flags, 0o644)


def _make_directories(directory: Path) -> None:
    """Make what is missing, so that no other user can write to it whatever the umask."""
    for missing in reversed(
        [each for each in (directory, *directory.parents) if not each.exists()]
    ):
        missing.mkdir(mode=0o755, exist_ok=True)
