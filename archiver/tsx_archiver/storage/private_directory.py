"""Directories that no other user can change, because their content is executed, trusted or secret.

A path is walked from the root by directory descriptors, so that exactly the checked components are
used. A component is trusted if all of this holds:

- Its owner is this user, root, or the owner of `/`, who can change everything anyway.
- No other user can write to it, and no group but root's and this user's own. A sticky directory
  such as /tmp is an exception, since other users cannot rename or remove its entries.
- A symbolic link belongs to one of these owners, and its target is checked in the same way.

No other user can then replace a component later. Missing directories are created with the mode
0700. In a pod of Kubernetes, directories of root are trusted in any mode: the kubelet creates
volumes with 0777, and only the containers of the pod see them. On Windows, nothing is checked.
"""

from __future__ import annotations

import errno
import logging
import os
import stat
import tempfile
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

logger = logging.getLogger("tsx.files")

CAN_CHECK = os.open in os.supports_dir_fd and hasattr(os, "geteuid")
MAX_LINKS = 40  # the limit of Linux
OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
WRITABLE_BY_OTHERS = "can be written by other users"

# O_PATH needs no permission to read, which a home directory may deny.
_OPEN_FLAGS = (
    getattr(os, "O_PATH", os.O_RDONLY)
    | getattr(os, "O_DIRECTORY", 0)
    | getattr(os, "O_NOFOLLOW", 0)
    | getattr(os, "O_CLOEXEC", 0)
)


def private_directory(path: Path, *, strict: bool = False) -> None:
    """Check a directory and all its parents, and create the missing ones.

    Args:
        path: The directory.
        strict: Whether no group may write to it, not even this user's own.

    Raises:
        PermissionError: Another user could change the directory or one of its parents.
        OSError: The directory cannot be created.
    """
    if not CAN_CHECK:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        return
    fd = _walk(path, _create)
    try:
        _check_last(os.fstat(fd), path, strict=strict)
    finally:
        os.close(fd)


def check_directory(path: Path, *, allow_sticky: bool = False) -> None:
    """Check a directory and all its parents; a missing one passes.

    Args:
        path: The directory.
        allow_sticky: Whether a sticky directory such as /tmp passes, because other users can
            neither rename nor remove this user's files there.

    Raises:
        PermissionError: Another user could change the directory or one of its parents.
    """
    if not CAN_CHECK:
        return
    with suppress(FileNotFoundError):
        fd = _walk(path, _raise_missing)
        try:
            status = os.fstat(fd)
            if not (allow_sticky and status.st_mode & stat.S_ISVTX):
                _check_last(status, path, strict=False)
        finally:
            os.close(fd)


def check_file(path: Path) -> None:
    """Check a file and its directory.

    Raises:
        PermissionError: Another user could change or replace the file.
        OSError: The file is missing.
    """
    check_directory(path.parent)
    status = path.lstat()
    _check_owner(status, path)
    if stat.S_ISLNK(status.st_mode):
        raise _refusal(path, "is a symbolic link")
    if CAN_CHECK and _lets_others_write(status):
        raise _refusal(path, WRITABLE_BY_OTHERS)


def warn_if_replaceable(setting: str, file: Path) -> None:
    """Log a warning if another user could replace a file that a setting names."""
    try:
        check_directory(file.absolute().parent, allow_sticky=True)
    except OSError as error:
        logger.warning("%s: another user can replace %s: %s", setting, file, error.strerror)


def temporary_directory() -> str:
    """Return the directory for temporary files that are executed or secret.

    Raises:
        PermissionError: Other users could change it.
    """
    directory = tempfile.gettempdir()
    try:
        check_directory(Path(directory), allow_sticky=True)
    except PermissionError as error:
        raise PermissionError(
            error.errno, f"{error.strerror}. Set TMPDIR to a directory of your own", directory
        ) from error
    return directory


@contextmanager
def scratch_directory(prefix: str) -> Iterator[Path]:
    """Yield a new directory in `temporary_directory()`, which is removed at the end."""
    with tempfile.TemporaryDirectory(prefix=prefix, dir=temporary_directory()) as path:
        yield Path(path)


def private_opener(path: str, flags: int) -> int:
    """Open a file for `open`; only this user may access a new one, and a link is refused."""
    return os.open(path, flags | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0), 0o600)


def is_trusted(status: os.stat_result) -> bool:
    """Tell whether the owner is this user, root, or the owner of `/`."""
    owners = (os.geteuid(), 0, os.stat("/").st_uid) if CAN_CHECK else ()  # noqa: PTH116
    return not CAN_CHECK or status.st_uid in owners


def _walk(path: Path, on_missing: Callable[[int, str, Path], None]) -> int:
    """Open a directory, and check each component relative to the descriptor of its parent."""
    remaining = deque(path.absolute().parts[1:])
    checked_path = Path("/")
    links = 0
    fd = os.open("/", _OPEN_FLAGS)
    try:
        while remaining:
            _check_parent(fd, checked_path)
            name = remaining.popleft()
            try:
                child_fd = os.open(name, _OPEN_FLAGS, dir_fd=fd)
            except FileNotFoundError:
                on_missing(fd, name, checked_path / name)
                remaining.appendleft(name)
                continue
            except OSError as error:
                target = _read_link(fd, name, checked_path / name, error)
                links += 1
                if links > MAX_LINKS:
                    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path)) from None
                remaining.extendleft(reversed([part for part in target.parts if part != "/"]))
                if not target.is_absolute():
                    continue
                child_fd, name = os.open("/", _OPEN_FLAGS), "/"
            os.close(fd)
            fd, checked_path = child_fd, checked_path / name
        _check_owner(os.fstat(fd), checked_path)
        return fd
    except BaseException:
        os.close(fd)
        raise


def _create(parent: int, name: str, path: Path) -> None:
    try:
        os.mkdir(name, 0o700, dir_fd=parent)
    except FileExistsError:  # Another process has created it; it is checked next.
        pass
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None


def _raise_missing(parent: int, name: str, path: Path) -> None:
    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))


def _read_link(parent: int, name: str, path: Path, error: OSError) -> Path:
    """Return the target of a symbolic link, or raise `error` if it is another file."""
    status = os.stat(name, dir_fd=parent, follow_symlinks=False)
    if not stat.S_ISLNK(status.st_mode):
        raise OSError(error.errno, error.strerror, str(path)) from None
    _check_owner(status, path)
    return Path(os.readlink(name, dir_fd=parent))


def _check_parent(fd: int, path: Path) -> None:
    """Check a directory that leads to another one."""
    status = os.fstat(fd)
    _check_owner(status, path)
    if _lets_others_write(status) and not status.st_mode & stat.S_ISVTX:
        raise _refusal(path, WRITABLE_BY_OTHERS)


def _check_last(status: os.stat_result, path: Path, *, strict: bool) -> None:
    if _lets_others_write(status) or (
        strict and status.st_uid == os.geteuid() and status.st_mode & OTHERS_WRITE
    ):
        raise _refusal(path, WRITABLE_BY_OTHERS)


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
    """Tell whether only this user is in a group.

    Root's group passes as well, because OpenShift runs containers in it.
    """
    if gid == 0:
        return True
    import grp  # Windows lacks this module.
    import pwd

    try:
        user, group = pwd.getpwuid(os.geteuid()), grp.getgrgid(gid)
    except KeyError:
        return False
    return (
        gid == user.pw_gid and group.gr_name == user.pw_name and set(group.gr_mem) <= {user.pw_name}
    )


def _refusal(path: Path, reason: str) -> PermissionError:
    return PermissionError(
        errno.EACCES, f"{path} {reason}, so its content cannot be trusted", str(path)
    )
