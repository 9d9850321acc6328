"""The seccomp filter of an isolated worker, which makes forbidden system calls fail.

libseccomp builds the filter. The filter lists forbidden calls; a list of allowed calls would
be too long and fragile, since torch, CUDA and Python use very many. Forbidden are

- changes of files that Landlock does not check: modes, owners, times, attributes;
- access to other processes of the user: ptrace, limits, priorities, shared memory of System V, and
  signals where Landlock cannot restrict them;
- leaving the process group, which the front end uses to kill a worker: setsid, setpgid;
- rarely needed interfaces with a large attack surface: namespaces, mounts, BPF, io_uring, keys,
  modules, clocks, userfaultfd, perf;
- sockets: without the network, all but socket pairs; with it, all but TCP, UDP, unix and netlink.

The filter compares only the lower 32 bits of int arguments, because the kernel reads only these.
"""

from __future__ import annotations

import ctypes
import errno
import os
import socket

_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_NOT_EQUAL, _GREATER, _MASKED = 1, 6, 7  # enum scmp_compare
_INT = 0xFFFFFFFF

_FILE_CALLS = (
    "chmod fchmod fchmodat chown fchown fchownat lchown utime utimes futimesat utimensat setxattr"
    " lsetxattr fsetxattr removexattr "
)
_FILE_CALLS += (
    "lremovexattr fremovexattr chroot open_by_handle_at fanotify_init quotactl acct swapon swapoff"
)
_PROCESS_CALLS = (
    "ptrace process_vm_readv process_vm_writev kcmp pidfd_getfd process_madvise move_pages"
    " migrate_pages ioprio_set "
)
_PROCESS_CALLS += "setsid setpgid shmget shmat shmctl semget semctl msgget msgctl mq_open mq_unlink"
_KERNEL_CALLS = (
    "unshare setns mount umount2 pivot_root move_mount open_tree fsopen fsconfig fsmount fspick"
    " mount_setattr bpf perf_event_open "
)
_KERNEL_CALLS += (
    "userfaultfd io_uring_setup io_uring_enter io_uring_register add_key request_key keyctl"
    " init_module finit_module delete_module "
)
_KERNEL_CALLS += (
    "kexec_load kexec_file_load reboot settimeofday clock_settime clock_adjtime adjtimex"
    " personality syslog vhangup "
)
_KERNEL_CALLS += "sethostname setdomainname"
# quotactl_fd, fchmodat2, setxattrat, removexattrat, open_tree_attr and file_setattr, which an
# older libseccomp does not know. Their numbers are the same on every architecture.
_NEWER_CALLS = (443, 452, 463, 466, 467, 469)
# the flags CLONE_NEW*
_NAMESPACE_FLAGS = (
    0x00020000,
    0x02000000,
    0x04000000,
    0x08000000,
    0x10000000,
    0x20000000,
    0x40000000,
)
# the ioctl requests TIOCSTI, TIOCLINUX, FIOSETOWN, SIOCSPGRP
_IOCTL_REQUESTS = (0x5412, 0x541C, 0x8901, 0x8902)
_FCNTL_COMMANDS = (
    8,
    15,
)  # the fcntl commands F_SETOWN, F_SETOWN_EX, which choose the receiver of SIGIO
_PR_SET_PDEATHSIG = 1
_NETLINK = 16
# SOCK_DGRAM and SOCK_RAW: a unix socket of these kinds can send to any path without connect.
_DATAGRAM_KINDS = (2, 3)
_SIGNAL_CALLS = "tkill rt_sigqueueinfo rt_tgsigqueueinfo pidfd_send_signal"


class _Compare(ctypes.Structure):
    _fields_ = [
        ("argument", ctypes.c_uint),
        ("operator", ctypes.c_int),
        ("first", ctypes.c_uint64),
        ("second", ctypes.c_uint64),
    ]


def library() -> ctypes.CDLL | None:
    """Load libseccomp, if it is installed."""
    try:
        libseccomp = ctypes.CDLL("libseccomp.so.2", use_errno=True)
    except OSError:
        return None
    libseccomp.seccomp_init.restype = ctypes.c_void_p
    return libseccomp


class Filter:
    """A filter for this process and its future children, in force after `load`.

    Its methods raise OSError if libseccomp rejects a rule.
    """

    def __init__(self) -> None:
        libseccomp = library()
        if libseccomp is None:
            raise OSError(errno.ENOENT, "libseccomp.so.2 is not installed")
        self._library = libseccomp
        self._context = ctypes.c_void_p(self._library.seccomp_init(ctypes.c_uint32(_ALLOW)))

    def refuse(
        self, calls: str | int, *conditions: tuple[int, int, int, int], error: int = errno.EPERM
    ) -> None:
        """Make system calls fail with `error` if all `conditions` hold.

        Args:
            calls: Names of system calls, separated by spaces, or the number of one.
            conditions: (argument, operator, value, 0), or (argument, _MASKED, mask, value).
            error: The errno that the caller gets.
        """
        numbers = (
            [calls] if isinstance(calls, int) else [self._number(name) for name in calls.split()]
        )
        array = (_Compare * max(1, len(conditions)))(*(_Compare(*row) for row in conditions))
        for number in numbers:
            # Numbers of -100 and less stand for calls that this architecture lacks.
            if number > -100:
                self._check(
                    self._library.seccomp_rule_add_array(
                        self._context, _ERRNO | error, number, len(conditions), array
                    )
                )

    def load(self) -> None:
        """Activate the filter."""
        self._check(self._library.seccomp_load(self._context))

    def _number(self, name: str) -> int:
        number = int(self._library.seccomp_syscall_resolve_name(name.encode()))
        if number == -1:
            raise OSError(errno.ENOSYS, f"libseccomp does not know {name}: it is too old")
        return number

    def _check(self, result: int) -> None:
        if result < 0:
            raise OSError(-result, os.strerror(-result))


def _equals(argument: int, value: int, mask: int = _INT) -> tuple[int, int, int, int]:
    return (argument, _MASKED, mask, value)


def _differs(argument: int, value: int) -> tuple[int, int, int, int]:
    return (argument, _NOT_EQUAL, value, 0)


def restrict(*, network: bool, landlock_abi: int) -> None:
    """Forbid this process and its future children the system calls in the module's list.

    The call needs no_new_privs or CAP_SYS_ADMIN.

    Raises:
        OSError: libseccomp is missing, too old, or rejects a call.
    """
    filter = Filter()
    filter.refuse(f"{_FILE_CALLS} {_PROCESS_CALLS} {_KERNEL_CALLS}")
    for number in _NEWER_CALLS:
        filter.refuse(number)
    for flag in _NAMESPACE_FLAGS:
        filter.refuse("clone", _equals(0, flag, flag))
    # A filter cannot read the flags of clone3. If clone3 is missing, the C library uses clone.
    filter.refuse("clone3", error=errno.ENOSYS)
    for request in _IOCTL_REQUESTS:
        filter.refuse("ioctl", _equals(1, request))
    for command in _FCNTL_COMMANDS:
        filter.refuse("fcntl", _equals(1, command))
    filter.refuse("prctl", _equals(0, _PR_SET_PDEATHSIG))
    # Process 0 means the caller, which may change itself.
    filter.refuse(
        "prlimit64 sched_setaffinity sched_setattr sched_setparam sched_setscheduler",
        _differs(0, 0),
    )
    filter.refuse("setpriority", _differs(0, os.PRIO_PROCESS))
    filter.refuse("setpriority", _differs(1, 0))
    _refuse_sockets(filter, network)
    _refuse_calls_beyond_landlock(filter, landlock_abi)
    filter.load()


def _refuse_sockets(filter: Filter, network: bool) -> None:
    unix = int(socket.AF_UNIX)
    if network:
        allowed_families = {unix, int(socket.AF_INET), int(socket.AF_INET6), _NETLINK}
        filter.refuse("socket", (0, _GREATER, max(allowed_families), 0), error=errno.EACCES)
        for family in set(range(max(allowed_families))) - allowed_families:
            filter.refuse("socket", _equals(0, family), error=errno.EACCES)
        return
    filter.refuse("socket", _differs(0, unix), error=errno.EACCES)
    filter.refuse("connect", error=errno.EACCES)
    for kind in _DATAGRAM_KINDS:
        filter.refuse("socket socketpair", _equals(1, kind, 0xF), error=errno.EACCES)


def _refuse_calls_beyond_landlock(filter: Filter, abi: int) -> None:
    if abi < 3:
        filter.refuse("truncate")
        # A filter cannot read the flags of openat2. If it is missing, the C library uses openat.
        filter.refuse("openat2", error=errno.ENOSYS)
        for mode in (os.O_RDONLY, 3):
            filter.refuse("open", _equals(1, os.O_TRUNC | mode, os.O_TRUNC | os.O_ACCMODE))
            filter.refuse("openat", _equals(2, os.O_TRUNC | mode, os.O_TRUNC | os.O_ACCMODE))
    if abi < 6:
        filter.refuse(_SIGNAL_CALLS)
        filter.refuse("kill tgkill", _differs(0, os.getpid()))
