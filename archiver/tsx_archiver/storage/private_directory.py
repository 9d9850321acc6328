"""Directories that no other user can change, because their content is executed, trusted or secret.

A path is walked from the root by directory descriptors, so what was checked is what is used. Each
component is trusted where

- its owner is this user, root, or the owner of `/`, who can change everything anyway;
- no other user can write to it, and no group but root's and the one that is this user's alone. In a
  sticky directory such as /tmp, other users cannot rename or remove what it holds, so that is
  enough where the next component is trusted as well;
- a symbolic link belongs to one of these owners; then the directories that it leads through are
  checked in the same way.

Once this holds, no other user can replace a component later, and paths below can be used like any
others. What is missing is made with the mode 0700. In a pod of Kubernetes, directories of root are
trusted whatever their mode: the kubelet makes volumes with 0777 and without the sticky bit, and
only the containers of the pod see them. On Windows directories are made and not checked.
"""

from __future__ import annotations

import errno
import logging
import os
import stat
import tempfile
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

logger = logging.getLogger("tsx.files")

CAN_CHECK = os.open in os.supports_dir_fd and hasattr(os, "geteuid")
MOST_LINKS = 40  # as in Linux
OTHERS = stat.S_IWGRP | stat.S_IWOTH
WRITABLE = "can be written by other users"

# O_PATH needs no permission to read: a home directory may let others only pass.
_OPEN = (
    getattr(os, "O_PATH", os.O_RDONLY)
    | getattr(os, "O_DIRECTORY", 0)
    | getattr(os, "O_NOFOLLOW", 0)
    | getattr(os, "O_CLOEXEC", 0)
)


def private_directory(path: Path, *, strict: bool = False) -> None:
    """Make it where it is missing.

    Raises PermissionError where another user could change it, or what leads to it, and OSError.

    `strict`: no group may write to it, not even the one that is this user's alone.
    """
    if not CAN_CHECK:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        return
    fd = _walk(path, _make)
    try:
        _check_last(os.fstat(fd), path, strict=strict)
    finally:
        os.close(fd)


def check_directory(path: Path, *, allow_sticky: bool = False) -> None:
    """Raises PermissionError where another user could change the directory, or what leads to it.

    A missing one is no error.

    `allow_sticky`: a sticky directory such as /tmp passes, since others can neither rename nor
    remove what this user makes there.
    """
    if not CAN_CHECK:
        return
    with suppress(FileNotFoundError):
        fd = _walk(path, _leave_missing)
        try:
            status = os.fstat(fd)
            if not (allow_sticky and status.st_mode & stat.S_ISVTX):
                _check_last(status, path, strict=False)
        finally:
            os.close(fd)


def check_file(path: Path) -> None:
    """Raises PermissionError where another user could change a file, or put another in its place,
    and OSError.
    """
    check_directory(path.parent)
    status = path.lstat()
    _check_owner(status, path)
    if stat.S_ISLNK(status.st_mode):
        raise _refusal(path, "is a symbolic link")
    if CAN_CHECK and _lets_others_write(status):
        raise _refusal(path, WRITABLE)


def warn_if_replaceable(setting: str, file: Path) -> None:
    """For a file that the user has placed: another user may not read it, and may lead its readers
    to another one.
    """
    try:
        check_directory(file.absolute().parent, allow_sticky=True)
    except OSError as error:
        logger.warning("%s: another user can replace %s: %s", setting, file, error.strerror)


def temporary_place() -> str:
    """The directory for temporary files, for what is run or kept secret. Raises OSError."""
    place = tempfile.gettempdir()
    try:
        check_directory(Path(place), allow_sticky=True)
    except PermissionError as error:
        raise PermissionError(
            error.errno, f"{error.strerror}. Set TMPDIR to a directory of your own", place
        ) from error
    return place


def private_opener(path: str, flags: int) -> int:
    """For `open`: a new file is this user's alone, and a symbolic link in the file's place is
    refused.
    """
    return os.open(path, flags | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0), 0o600)


def is_trusted(status: os.stat_result) -> bool:
    """Whether the owner is one that could change everything here anyway."""
    return not CAN_CHECK or status.st_uid in (
        os.geteuid(),
        0,
        os.stat("/").st_uid,  # noqa: PTH116
    )  # beside the other calls of os


def _walk(path: Path, on_missing: Callable[[int, str, Path], None]) -> int:
    """A descriptor of the directory; each component was checked under the descriptor of the one
    before.
    """
    left = deque(path.absolute().parts[1:])
    done = Path("/")
    links = 0
    fd = os.open("/", _OPEN)
    try:
        while left:
            _check(fd, done)
            name = left.popleft()
            try:
                below = os.open(name, _OPEN, dir_fd=fd)
            except FileNotFoundError:
                on_missing(fd, name, done / name)
                left.appendleft(name)
                continue
            except OSError as error:
                target = _link(fd, name, done / name, error)
                links += 1
                if links > MOST_LINKS:
                    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path)) from None
                left.extendleft(reversed([part for part in target.parts if part != "/"]))
                if not target.is_absolute():
                    continue
                below, name = os.open("/", _OPEN), "/"
            os.close(fd)
            fd, done = below, done / name
        _check_owner(os.fstat(fd), done)
        return fd
    except BaseException:
        os.close(fd)
        raise


def _make(parent: int, name: str, path: Path) -> None:
    try:
        os.mkdir(name, 0o700, dir_fd=parent)
    except FileExistsError:  # another process has made it meanwhile; it is checked next
        pass
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None


def _leave_missing(parent: int, name: str, path: Path) -> None:
    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))


def _link(parent: int, name: str, path: Path, error: OSError) -> Path:
    """Where the link leads; for anything else that is no directory, the error."""
    status = os.stat(name, dir_fd=parent, follow_symlinks=False)
    if not stat.S_ISLNK(status.st_mode):
        raise OSError(error.errno, error.strerror, str(path)) from None
    _check_owner(status, path)
    return Path(os.readlink(name, dir_fd=parent))


def _check(fd: int, path: Path) -> None:
    """Of a directory on the way."""
    status = os.fstat(fd)
    _check_owner(status, path)
    if _lets_others_write(status) and not status.st_mode & stat.S_ISVTX:
        raise _refusal(path, WRITABLE)


def _check_last(status: os.stat_result, path: Path, *, strict: bool) -> None:
    if _lets_others_write(status) or (
        strict and status.st_uid == os.geteuid() and status.st_mode & OTHERS
    ):
        raise _refusal(path, WRITABLE)


def _check_owner(status: os.stat_result, path: Path) -> None:
    if not is_trusted(status):
        raise _refusal(path, f"belongs to another user (uid {status.st_uid})")


def _lets_others_write(status: os.stat_result) -> bool:
    if status.st_uid == 0 and "KUBERNETES_SERVICE_HOST" in os.environ:
        return False
    return bool(
        status.st_mode & stat.S_IWOTH
        or (status.st_mode & stat.S_IWGRP and not _is_own_group(status.st_gid))
    )


def _is_own_group(gid: int) -> bool:
    """Root's group, in which containers of OpenShift run, or the one that many systems make for
    each user, with no other member.
    """
    if gid == 0:
        return True
    import grp  # not on Windows
    import pwd

    try:
        user, group = pwd.getpwuid(os.geteuid()), grp.getgrgid(gid)
    except KeyError:
        return False
    return (
        gid == user.pw_gid and group.gr_name == user.pw_name and set(group.gr_mem) <= {user.pw_name}
    )


def _refusal(path: Path, why: str) -> PermissionError:
    return PermissionError(
        errno.EACCES, f"{path} {why}, so its content cannot be trusted", str(path)
    )
