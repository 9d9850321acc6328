"""A log file that is rotated by size, and created again if it was moved or deleted."""

from __future__ import annotations

import errno
import logging
import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from tsx_archiver.storage.private_directory import check_directory, is_trusted

# Minimum time between two messages about lost lines. On a nearly full disk, some lines can be
# written and others cannot.
MESSAGE_INTERVAL_S = 10.0

logger = logging.getLogger("tsx.server")


class LogFile(logging.Handler):
    """A log file with rotation, which only the thread that writes the log may use.

    No other program may append to the file while the server runs. Old files are `path.1` to
    `path.MAX_FILES`; `path.1` is the newest. If lines cannot be written, they are lost, and the
    server's log tells their number.
    """

    def __init__(
        self,
        path: Path,
        max_bytes: int,
        max_files: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Open the file.

        Raises:
            OSError: The file cannot be created.
        """
        super().__init__()
        self.path = path
        self._max_bytes = max_bytes
        self._max_files = max_files
        self._fd = _open(path)
        self._clock = clock
        self._lost_lines = 0  # number since the last message
        self._logged_at = 0.0  # time of the last message

    def emit(self, record: logging.LogRecord) -> None:
        try:
            lines = self.format(record) + "\n"
        except Exception:  # The arguments of the log call may not fit its format string.
            self.handleError(record)
            return
        try:
            self._write(lines.encode("utf-8", "backslashreplace"))
        except OSError as error:
            self._count_lost(lines.count("\n"), error)
            return
        if self._lost_lines and self._clock() - self._logged_at >= MESSAGE_INTERVAL_S:
            lost_lines, self._lost_lines = self._lost_lines, 0
            logger.warning("%s can be written again; %d lines were lost", self.path, lost_lines)

    def close(self) -> None:
        with suppress(OSError):
            os.close(self._fd)
        self._fd = -1
        super().close()

    def _write(self, data: bytes) -> None:
        self._reopen_if_moved()
        size = os.fstat(self._fd).st_size
        if 0 < self._max_bytes < size + len(data) and size:
            self._roll_over()
            size = os.fstat(self._fd).st_size
        view = memoryview(data)
        try:
            while view:
                view = view[os.write(self._fd, view) :]
        except OSError:
            # The disk is full after a part of the data. A partial line would spoil the next line.
            os.ftruncate(self._fd, size)
            raise

    def _reopen_if_moved(self) -> None:
        """Open the path again if its file was moved or deleted."""
        try:
            path_stat, file_stat = self.path.stat(), os.fstat(self._fd)
            if (path_stat.st_dev, path_stat.st_ino) == (file_stat.st_dev, file_stat.st_ino):
                return
        except FileNotFoundError:
            pass
        try:
            self._open_again()
        except OSError:
            if not os.fstat(self._fd).st_nlink:
                raise
            # No new file can be created, so lines are still written to the moved file.

    def _open_again(self) -> None:
        fd = _open(self.path)
        os.close(self._fd)
        self._fd = fd

    def _roll_over(self) -> None:
        """Rotate the files; if they cannot be renamed, continue to write to the current one."""
        paths = [
            self.path,
            *(
                self.path.with_name(f"{self.path.name}.{number}")
                for number in range(1, self._max_files + 1)
            ),
        ]
        with suppress(OSError):
            for older, newer in zip(reversed(paths), reversed(paths[:-1]), strict=False):
                if newer.exists():
                    newer.replace(older)
            self.path.unlink(missing_ok=True)  # The file still exists if there are no old files.
            self._open_again()

    def _count_lost(self, lines: int, error: OSError) -> None:
        if not self._lost_lines:
            self._logged_at = self._clock()
            logger.error(
                "%s cannot be written, so its lines are lost until it can: %s",
                self.path,
                error.strerror,
            )
        self._lost_lines += lines


def _open(path: Path) -> int:
    """Open a log file; follow a symbolic link (for example to /dev/stdout) only if it is trusted.

    A link is not trusted if another user has created it or could change it.
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
    """Create missing directories, to which only this user can write even with umask 0."""
    for missing_directory in reversed(
        [path for path in (directory, *directory.parents) if not path.exists()]
    ):
        missing_directory.mkdir(mode=0o755, exist_ok=True)
