"""The processes of pytest-xdist, forked from a process that has collected the tests.

That process has imported the test modules and rewritten their assertions once. A forked process
then collects the tests again in a quarter of the time. The programs of tests are forked from the
same process.
"""

from __future__ import annotations

import contextlib
import gc
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support import forked, line_coverage


class Collected:
    """The process that has collected the tests, with forkers for test runners and for programs."""

    def __init__(self, paths: Sequence[str]) -> None:
        """Start the process, which collects the tests at these paths."""
        (programs, child_programs), (runners, child_runners) = (
            socket.socketpair(),
            socket.socketpair(),
        )
        with child_programs, child_runners:
            numbers = [child_programs.fileno(), child_runners.fileno()]
            command = [sys.executable, "-m", __name__, *map(str, numbers), *paths]
            self._process = subprocess.Popen(
                command,
                cwd=Path(__file__).parents[2],
                env=os.environ | forked.PASSIVE,
                pass_fds=numbers,
            )
        self.programs, self.runners = forked.Forker(programs), forked.Forker(runners)

    def start(self, command: Sequence[str], **options: Any) -> Runner:
        """Start a process that runs tests, with the arguments of `subprocess.Popen`."""
        own_socket, child_socket = socket.socketpair()
        with own_socket, child_socket:
            fork = [sys.executable, "-m", forked.__name__, str(child_socket.fileno())]
            Runner(
                self.programs, {}, fork, pass_fds=[child_socket.fileno()], stdin=subprocess.DEVNULL
            )._ended = None
            arguments = [argument for argument in command if argument not in ("-u", "-B")]
            return Runner(
                self.runners,
                {"forker": own_socket.fileno()},
                arguments,
                pass_fds=[own_socket.fileno()],
                **options,
            )


class Runner(forked.Popen):
    def __init__(
        self, forker: forked.Forker, more: dict[str, Any], command: Sequence[str], **options: Any
    ) -> None:
        self._forker, self._more = forker, more
        super().__init__(command, **options)

    def _fork(self, order: dict[str, Any], files: list[int]) -> int:
        return self._forker.fork(order | self._more, files)


def collect(programs: socket.socket, runners: socket.socket, paths: Sequence[str]) -> None:
    # Forking a large process is slow, so programs are forked before the tests are collected.
    forked.get_ready()
    if not os.fork():
        runners.close()
        forked.serve(programs)
        os._exit(0)
    programs.close()
    with open(os.devnull, "w") as null_file, contextlib.redirect_stdout(null_file):
        options = ["--collect-only", "-p", "no:xdist", "-p", "no:cacheprovider"]
        exit_code = pytest.main([*options, *paths])
    if exit_code not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        # A module that fails to import remains in sys.modules without tests. It is removed, so that
        # the test runners import it again and report the error.
        for name in [name for name in sys.modules if name.rpartition(".")[2].startswith("test_")]:
            del sys.modules[name]
    gc.freeze()
    gc.disable()  # tests/conftest.py enables it after the collection
    line_coverage.save()
    forked.serve(runners)


if __name__ == "__main__":
    collect(
        socket.socket(fileno=int(sys.argv[1])), socket.socket(fileno=int(sys.argv[2])), sys.argv[3:]
    )
