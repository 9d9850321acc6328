"""The first steps of a worker that runs as a separate program."""

from __future__ import annotations

import ctypes
import os
import signal
import site
import sys
import sysconfig

_PR_SET_PDEATHSIG = 1


def put_first(packages: str) -> None:
    """Put a directory of packages, and the paths of its .pth files, before installed packages and behind the standard library."""
    before = list(sys.path)
    if packages in before:  # the interpreter is the environment's own, and has put it where it belongs
        return
    site.addsitedir(packages)
    added = [place for place in sys.path if place not in before]
    paths = sysconfig.get_paths()
    library = {paths["stdlib"], paths["platstdlib"], f"{paths['platstdlib']}/lib-dynload"}
    sys.path[:] = [*(place for place in before if place in library), *added, *(place for place in before if place not in library)]


def end_with_parent() -> None:
    """Be killed when the process that started this one ends, however it ends. Linux only: elsewhere the closed socket shows it."""
    parent = os.getppid()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it ended in between
            os._exit(1)
