"""The seccomp filter, built by libseccomp: refuses system calls of an isolated process with an
error instead of killing it.

It is a list of what is refused: torch, CUDA and Python use more calls than can be listed. Refused
are

- what changes files without opening them, which Landlock does not see: modes, owners, times,
  attributes;
- what reaches other processes of the same user: ptrace, limits, priorities, shared memory of System
  V, signals before Landlock had them;
- what leaves the process group by which the front end ends a worker: setsid, setpgid;
- the kernel's wide and rarely needed surface: namespaces, mounts, BPF, io_uring, keys, modules,
  clocks, userfaultfd, perf;
- sockets: all but pairs without the network; all but TCP, UDP, unix and route sockets with it.

Arguments of type int are compared in their lower 32 bits, as the kernel takes them.
"""

from __future__ import annotations

import ctypes
import errno
import os
import socket

_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_NOT_EQUAL, _GREATER, _MASKED = 1, 6, 7  # enum scmp_compare
_INT = 0xFFFFFFFF

_FILES = (
    "chmod fchmod fchmodat chown fchown fchownat lchown utime utimes futimesat utimensat setxattr"
    " lsetxattr fsetxattr removexattr "
)
_FILES += (
    "lremovexattr fremovexattr chroot open_by_handle_at fanotify_init quotactl acct swapon swapoff"
)
_PROCESSES = (
    "ptrace process_vm_readv process_vm_writev kcmp pidfd_getfd process_madvise move_pages"
    " migrate_pages ioprio_set "
)
_PROCESSES += "setsid setpgid shmget shmat shmctl semget semctl msgget msgctl mq_open mq_unlink"
_KERNEL = (
    "unshare setns mount umount2 pivot_root move_mount open_tree fsopen fsconfig fsmount fspick"
    " mount_setattr bpf perf_event_open "
)
_KERNEL += (
    "userfaultfd io_uring_setup io_uring_enter io_uring_register add_key request_key keyctl"
    " init_module finit_module delete_module "
)
_KERNEL += (
    "kexec_load kexec_file_load reboot settimeofday clock_settime clock_adjtime adjtimex"
    " personality syslog vhangup "
)
_KERNEL += "sethostname setdomainname"
_NEWER = (
    443,
    452,
    463,
    466,
    467,
    469,
    # quotactl_fd, fchmodat2, setxattrat, removexattrat, open_tree_attr, file_setattr: alike
    # everywhere
)
# CLONE_NEW*
_NAMESPACES = (0x00020000, 0x02000000, 0x04000000, 0x08000000, 0x10000000, 0x20000000, 0x40000000)
# ioctl TIOCSTI, TIOCLINUX, FIOSETOWN, SIOCSPGRP.
_TERMINAL_AND_OWNER = (0x5412, 0x541C, 0x8901, 0x8902)
_SET_OWNER = (8, 15)  # fcntl F_SETOWN, F_SETOWN_EX: the receiver of SIGIO
_PR_SET_PDEATHSIG = 1
_NETLINK = 16
# SOCK_DGRAM, and SOCK_RAW, which is one for a unix socket: they send to any path.
_STREAM_KINDS = (2, 3)
_SIGNALS = "tkill rt_sigqueueinfo rt_tgsigqueueinfo pidfd_send_signal"


class _Compare(ctypes.Structure):
    _fields_ = [
        ("argument", ctypes.c_uint),
        ("operator", ctypes.c_int),
        ("first", ctypes.c_uint64),
        ("second", ctypes.c_uint64),
    ]


def library() -> ctypes.CDLL | None:
    try:
        found = ctypes.CDLL("libseccomp.so.2", use_errno=True)
    except OSError:
        return None
    found.seccomp_init.restype = ctypes.c_void_p
    return found


class Filter:
    """A filter for this process and its future children, once it is loaded.

    Raises OSError for calls that libseccomp rejects.
    """

    def __init__(self) -> None:
        library_found = library()
        if library_found is None:
            raise OSError(errno.ENOENT, "libseccomp.so.2 is not installed")
        self._library = library_found
        self._context = ctypes.c_void_p(self._library.seccomp_init(ctypes.c_uint32(_ALLOW)))

    def refuse(
        self, calls: str | int, *compare: tuple[int, int, int, int], error: int = errno.EPERM
    ) -> None:
        """`compare`: (argument, operator, value) for all of which it is refused; for _MASKED the
        mask comes before the value.
        """
        names = (
            [calls] if isinstance(calls, int) else [self._number(name) for name in calls.split()]
        )
        conditions = (_Compare * max(1, len(compare)))(*(_Compare(*each) for each in compare))
        for number in names:
            if number > -100:  # below that: calls that this architecture does not have
                self._do(
                    self._library.seccomp_rule_add_array(
                        self._context, _ERRNO | error, number, len(compare), conditions
                    )
                )

    def load(self) -> None:
        self._do(self._library.seccomp_load(self._context))

    def _number(self, name: str) -> int:
        number = int(self._library.seccomp_syscall_resolve_name(name.encode()))
        if number == -1:
            raise OSError(errno.ENOSYS, f"libseccomp does not know {name}: it is too old")
        return number

    def _do(self, result: int) -> None:
        if result < 0:
            raise OSError(-result, os.strerror(-result))


def _equals(argument: int, value: int, mask: int = _INT) -> tuple[int, int, int, int]:
    return (argument, _MASKED, mask, value)


def _differs(argument: int, value: int) -> tuple[int, int, int, int]:
    return (argument, _NOT_EQUAL, value, 0)


def restrict(*, network: bool, landlock_abi: int) -> None:
    """Raises OSError. Needs no_new_privs, or CAP_SYS_ADMIN."""
    filter = Filter()
    filter.refuse(f"{_FILES} {_PROCESSES} {_KERNEL}")
    for number in _NEWER:
        filter.refuse(number)
    for flag in _NAMESPACES:
        filter.refuse("clone", _equals(0, flag, flag))
    filter.refuse(
        "clone3", error=errno.ENOSYS
    )  # its flags are out of sight; the C library then uses clone
    for request in _TERMINAL_AND_OWNER:
        filter.refuse("ioctl", _equals(1, request))
    for command in _SET_OWNER:
        filter.refuse("fcntl", _equals(1, command))
    filter.refuse("prctl", _equals(0, _PR_SET_PDEATHSIG))
    filter.refuse(
        "prlimit64 sched_setaffinity sched_setattr sched_setparam sched_setscheduler",
        _differs(0, 0),
    )  # of others
    filter.refuse("setpriority", _differs(0, os.PRIO_PROCESS))
    filter.refuse("setpriority", _differs(1, 0))
    _refuse_sockets(filter, network)
    _refuse_what_landlock_lacks(filter, landlock_abi)
    filter.load()


def _refuse_sockets(filter: Filter, network: bool) -> None:
    unix = int(socket.AF_UNIX)
    if network:
        allowed = {unix, int(socket.AF_INET), int(socket.AF_INET6), _NETLINK}
        filter.refuse("socket", (0, _GREATER, max(allowed), 0), error=errno.EACCES)
        for family in set(range(max(allowed))) - allowed:
            filter.refuse("socket", _equals(0, family), error=errno.EACCES)
        return
    filter.refuse("socket", _differs(0, unix), error=errno.EACCES)
    filter.refuse("connect", error=errno.EACCES)
    for kind in _STREAM_KINDS:
        filter.refuse("socket socketpair", _equals(1, kind, 0xF), error=errno.EACCES)


def _refuse_what_landlock_lacks(filter: Filter, abi: int) -> None:
    if abi < 3:
        filter.refuse("truncate")
        filter.refuse("openat2", error=errno.ENOSYS)  # its flags are out of sight
        for mode in (os.O_RDONLY, 3):
            filter.refuse("open", _equals(1, os.O_TRUNC | mode, os.O_TRUNC | os.O_ACCMODE))
            filter.refuse("openat", _equals(2, os.O_TRUNC | mode, os.O_TRUNC | os.O_ACCMODE))
    if abi < 6:
        filter.refuse(_SIGNALS)
        filter.refuse("kill tgkill", _differs(0, os.getpid()))
