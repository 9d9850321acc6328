"""The processes of pytest-xdist, forked from one that has collected the tests.

The tests' modules are imported and their assertions rewritten once. A forked process then collects
them again in a quarter of the time. The programs of tests are forked from the same process.
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
    """The process that has collected the tests, with a forker of runners and one of programs."""

    def __init__(self, paths: Sequence[str]) -> None:
        """Start the process, which collects the tests of these paths."""
        (programs, their_programs), (runners, their_runners) = (
            socket.socketpair(),
            socket.socketpair(),
        )
        with their_programs, their_runners:
            numbers = [their_programs.fileno(), their_runners.fileno()]
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
        ours, theirs = socket.socketpair()
        with ours, theirs:
            fork = [sys.executable, "-m", forked.__name__, str(theirs.fileno())]
            Runner(
                self.programs, {}, fork, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL
            )._ended = None
            arguments = [argument for argument in command if argument not in ("-u", "-B")]
            return Runner(
                self.runners,
                {"forker": ours.fileno()},
                arguments,
                pass_fds=[ours.fileno()],
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
    # A fork takes as long as its parent is large, so the parent of programs collects no tests.
    forked.get_ready()
    if not os.fork():
        runners.close()
        forked.serve(programs)
        os._exit(0)
    programs.close()
    with open(os.devnull, "w") as nothing, contextlib.redirect_stdout(nothing):
        options = ["--collect-only", "-p", "no:xdist", "-p", "no:cacheprovider"]
        ended = pytest.main([*options, *paths])
    if ended not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        # A module that could not be imported is in sys.modules nevertheless, without tests. The
        # processes that run tests import it anew, and report why it fails.
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
