"""Landlock: restricts the file trees that this process and its children can reach.

It needs Linux 5.13 or later, but not root. The ABI number of the kernel tells what it can restrict
(https://docs.kernel.org/userspace-api/landlock.html):

    1  reading, executing, writing, making and removing files      3  truncating files
    2  moving files between directories                            5  ioctl on devices
    6  signals to, and abstract unix sockets of, processes outside

Landlock does not restrict chmod, chown, utime and setxattr; `seccomp.py` refuses these calls.
"""

from __future__ import annotations

import ctypes
import os
import stat
import struct
from collections.abc import Iterable

# System calls have these numbers on every architecture.
_CREATE, _ADD_RULE, _RESTRICT = (444, 445, 446)
_VERSION = 1  # a flag of _CREATE: return the ABI number
_PATH_BENEATH = 1

EXECUTE, WRITE_FILE, READ_FILE, READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
_TRUNCATE, _IOCTL_DEVICE = 1 << 14, 1 << 15
# rights that apply to files; the others apply to directories only
_FILE_RIGHTS = EXECUTE | WRITE_FILE | READ_FILE | _TRUNCATE | _IOCTL_DEVICE
_SCOPES = 0b11  # abstract unix sockets, signals

READ = READ_FILE | READ_DIR | EXECUTE
DEVICE = READ_FILE | READ_DIR | WRITE_FILE | _IOCTL_DEVICE
ALL = (1 << 16) - 1


def abi() -> int:
    """Return the ABI number of the kernel, or 0 if Landlock is missing or off."""
    try:
        return max(0, _syscall(_CREATE, None, 0, _VERSION))
    except OSError:
        return 0


def restrict(rules: Iterable[tuple[str, int]], version: int) -> None:
    """Forbid this process and its future children all access that `rules` do not allow.

    The call needs no_new_privs or CAP_SYS_ADMIN.

    Args:
        rules: Pairs of a path and its rights. Paths that do not exist are ignored.
        version: The ABI number of the kernel.

    Raises:
        OSError: The kernel rejects a rule.
    """
    handled_rights = (
        1 << (13 if version < 2 else 14 if version < 3 else 15 if version < 5 else 16)
    ) - 1
    attributes = struct.pack("=QQQ", handled_rights, 0, _SCOPES if version >= 6 else 0)
    ruleset = _syscall(_CREATE, attributes, len(attributes), 0)
    try:
        for path, rights in rules:
            _allow(ruleset, path, rights & handled_rights)
        _syscall(_RESTRICT, ruleset, 0)
    finally:
        os.close(ruleset)


def _allow(ruleset: int, path: str, rights: int) -> None:
    try:
        fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return
    try:
        if not stat.S_ISDIR(os.fstat(fd).st_mode):
            rights &= _FILE_RIGHTS
        _syscall(_ADD_RULE, ruleset, _PATH_BENEATH, struct.pack("=Qi", rights, fd), 0)
    finally:
        os.close(fd)


def _syscall(number: int, *arguments: bytes | int | None) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    result = int(
        libc.syscall(
            ctypes.c_long(number),
            *(ctypes.c_long(value) if isinstance(value, int) else value for value in arguments),
        )
    )
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result
