"""The first program of an isolated worker: it drops its rights, then runs the Python interpreter.

It runs before any code of the archive, including the `.pth` files of a model's own environment. It
imports only the standard library. No process that it starts can regain the rights.
"""

from __future__ import annotations

import ctypes
import os
import signal
from typing import NoReturn, TypedDict

from tsx_runtime.features.isolation.sandbox import landlock, seccomp
from tsx_runtime.shared.nonblocking_output import send_output_to

# <linux/prctl.h>
_PR_SET_PDEATHSIG, _PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS = 1, 24, 38
_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL = 47, 4
_CAPABILITY_VERSION_3 = 0x20080522
_MAX_CAPABILITIES = 64


class SandboxConfig(TypedDict):
    """The rights of an isolated worker."""

    command: list[str]
    scratch: str  # the only directory that the worker may write
    read: list[str]  # files and directories
    devices: list[str]  # paths of usable devices
    network: bool
    group: str | None  # cgroup to join
    output: str | None  # socket for stdout and stderr, see `LoadOrder.output`
    label: str  # the worker's name in the log of its output


def enter(config: SandboxConfig) -> NoReturn:
    """Drop the rights that `config` does not grant, then run its command in this process.

    Raises:
        OSError: The kernel lacks a feature; `features/isolation/config.py` checks this in advance.
    """
    parent = os.getppid()
    if config["group"] is not None:
        with open(f"{config['group']}/cgroup.procs", "w") as members:
            members.write("0")
    if config["output"]:
        send_output_to(config["output"], config["label"])
    os.chdir(config["scratch"])
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # The kernel sends no signal for a parent that ended before the request; check for that.
    if os.getppid() != parent:
        os._exit(1)
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)
    _drop_capabilities()
    abi = landlock.abi()
    rules = [(path, landlock.READ) for path in config["read"]] + [
        (path, landlock.DEVICE) for path in config["devices"]
    ]
    landlock.restrict([*rules, (config["scratch"], landlock.ALL)], abi)
    seccomp.restrict(network=config["network"], landlock_abi=abi)
    os.execv(config["command"][0], config["command"])


def _drop_capabilities() -> None:
    """Drop all capabilities, so that root keeps only the access of its user id to files.

    no_new_privs prevents programs from regaining them.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    for capability in range(_MAX_CAPABILITIES):
        # A failure is harmless: the process lacks the capability, or the number is unused.
        libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0)
    _prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL)
    if libc.capset((ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0), (ctypes.c_uint32 * 6)()):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
