"""What a worker does that is a program of its own, before it is a worker like any other."""

from __future__ import annotations

import ctypes
import os
import signal
import site
import sys
import sysconfig

_PR_SET_PDEATHSIG = 1


def put_first(packages: str) -> None:
    """Have a directory of packages, and what its .pth files name, come before all that is installed, and behind the standard library."""
    before = list(sys.path)
    if packages in before:  # the interpreter is the environment's own, and has put it where it belongs
        return
    site.addsitedir(packages)
    added = [place for place in sys.path if place not in before]
    paths = sysconfig.get_paths()
    library = {paths["stdlib"], paths["platstdlib"], f"{paths['platstdlib']}/lib-dynload"}
    sys.path[:] = [*(place for place in before if place in library), *added, *(place for place in before if place not in library)]


def end_with_parent() -> None:
    """Be killed when the process that started this one ends, however it ends. Linux only: elsewhere the closed socket tells."""
    parent = os.getppid()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it ended in between
            os._exit(1)
