"""Advisory locks between processes on open files; the end of a process releases its locks.

Windows has no such shared locks. `CAN_LOCK` is False there, locking always succeeds, renames keep
the cache consistent, and nothing is ever removed from it.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

from tsx_archiver.errors import CacheError

try:
    import fcntl
except ImportError:  # Windows
    CAN_LOCK = False
else:
    CAN_LOCK = True


class FileLock:
    """An open lock file; two of them conflict even inside one process."""

    def __init__(self, path: Path) -> None:
        """Open the file, and create it if it is missing."""
        self.path = path
        self._fd: int | None = os.open(
            path,
            os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NOFOLLOW", 0),
            0o600,
        )

    def lock_shared(self) -> bool:
        """Take a shared lock without waiting, and tell whether that succeeded."""
        return self._lock("LOCK_SH", wait=False)

    def lock_exclusive(self, *, wait: bool) -> bool:
        """Take an exclusive lock, and tell whether that succeeded."""
        return self._lock("LOCK_EX", wait=wait)

    def is_current(self) -> bool:
        """Tell whether the path still leads to this file."""
        if self._fd is None:
            return False
        try:
            status = self.path.stat()
        except OSError:
            return False
        return os.path.samestat(status, os.fstat(self._fd))

    def set_path(self, path: Path) -> None:
        """Set the path after the file was renamed; the lock stays."""
        self.path = path

    def close(self) -> None:
        """Release the lock and close the file."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _lock(self, kind: str, *, wait: bool) -> bool:
        assert self._fd is not None
        if not CAN_LOCK:
            return True
        try:
            fcntl.flock(self._fd, getattr(fcntl, kind) | (0 if wait else fcntl.LOCK_NB))
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EACCES):
                return False
            reason = f"cannot be locked ({error.strerror})"
            raise CacheError(
                f"{self.path} {reason}. Choose a cache directory on a local disk.",
                f"its files {reason}",
            ) from error
        return True
