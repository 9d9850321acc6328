"""Advisory locks between processes, on open files; they end with their process.

On Windows there is no shared lock of this kind. There locking always succeeds, renames alone keep
the cache whole, and nothing is ever cleaned up (`CAN_LOCK` says which).
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
    """An open lock file. Locks of two FileLocks conflict even inside one process."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd: int | None = os.open(
            path,
            os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NOFOLLOW", 0),
            0o600,
        )

    def share(self) -> bool:
        """Take it together with other sharers; False where someone holds it alone. Never waits."""
        return self._lock("LOCK_SH", wait=False)

    def own(self, *, wait: bool) -> bool:
        """Take it alone; False where anyone else holds it and `wait` is not asked for."""
        return self._lock("LOCK_EX", wait=wait)

    def is_current(self) -> bool:
        """Whether the path still leads to the file that is locked here, and not to nothing or to a
        newer one.
        """
        if self._fd is None:
            return False
        try:
            there = self.path.stat()
        except OSError:
            return False
        return os.path.samestat(there, os.fstat(self._fd))

    def moved(self, path: Path) -> None:
        """The file was renamed; the lock, which is on the file, stays."""
        self.path = path

    def close(self) -> None:
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
