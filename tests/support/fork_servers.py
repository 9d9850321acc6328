"""The fork server of a process that runs tests, forked like other programs."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import psutil

from tests.support import forked, line_coverage


def start_for_multiprocessing(args: Sequence[Any], **options: Any) -> subprocess.Popen[Any]:
    """Start `python OPTIONS -c CODE`, and fork it if it is a fork server."""
    arguments = [os.fsdecode(argument) for argument in args]
    code = arguments[arguments.index("-c") + 1]
    if line_coverage.FORK_SERVER not in code or not forked.FORKS:
        return line_coverage.Popen(args, **options)
    server = forked.Popen(
        [sys.executable, "-c", code],
        pass_fds=options["pass_fds"],
        env=options["env"],
        restore_signals=False,
    )
    _fork_servers[server.pid] = server
    return server


def wait_for_fork_server(pid: int, options: int) -> tuple[int, int]:
    """Wait like `os.waitpid`, also for a fork server that is not a child of this process."""
    server = _fork_servers.get(pid)
    if server is None or server._ended is None:
        return os.waitpid(pid, options)
    exit_status = server._try_wait(options)
    if not exit_status[0] and _is_gone(pid):
        exit_status = server._try_wait(0)  # the status arrives soon after the process has ended
    return exit_status


def _is_gone(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


_fork_servers: dict[int, forked.Popen] = {}
