"""What a worker does that is a program of its own, before it is a worker like any other."""

from __future__ import annotations

import ctypes
import os
import signal
import site
import sys

_PR_SET_PDEATHSIG = 1


def put_first(packages: str) -> None:
    """Have a directory of packages, and what its .pth files name, come before everything that is installed."""
    before = list(sys.path)
    if packages in before:  # the interpreter is the environment's own, and has put it where it belongs
        return
    site.addsitedir(packages)
    added = [place for place in sys.path if place not in before]
    sys.path[:] = [*added, *before]


def end_with_parent() -> None:
    """Be killed when the process that started this one ends, however it ends. Linux only: elsewhere the closed socket tells."""
    parent = os.getppid()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it ended in between
            os._exit(1)
