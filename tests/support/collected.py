"""Forks the processes that tests run in from one that has collected them: its modules are imported,
and their assertions rewritten, once.

Each then walks through what there is, in a quarter of the time. The process that a test's programs
are forked from comes from the same one.
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
    """Of the process that runs no test itself: its two forkers."""

    def __init__(self, paths: Sequence[str]) -> None:
        """`paths`: what tests are to be collected from."""
        (programs, their_programs), (runners, their_runners) = (
            socket.socketpair(),
            socket.socketpair(),
        )
        with their_programs, their_runners:
            numbers = [their_programs.fileno(), their_runners.fileno()]
            words = [sys.executable, "-m", __name__, *map(str, numbers), *paths]
            self._process = subprocess.Popen(
                words,
                cwd=Path(__file__).parents[2],
                env=os.environ | forked.PASSIVE,
                pass_fds=numbers,
            )
        self.programs, self.runners = forked.Forker(programs), forked.Forker(runners)

    def start(self, command: Sequence[str], **options: Any) -> Runner:
        """In the place of `subprocess.Popen`, of a process that runs tests."""
        ours, theirs = socket.socketpair()
        with ours, theirs:
            fork = [sys.executable, "-m", forked.__name__, str(theirs.fileno())]
            Runner(
                self.programs, {}, fork, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL
            )._ended = None
            words = [word for word in command if word not in ("-u", "-B")]
            return Runner(
                self.runners, {"forker": ours.fileno()}, words, pass_fds=[ours.fileno()], **options
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
    # and no more: a fork takes as long as its parent is large, and there are thousands
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
        # A module that could not be imported is found in sys.modules nevertheless, without tests:
        # those that run them import it anew, and report why it fails.
        for name in [name for name in sys.modules if name.rpartition(".")[2].startswith("test_")]:
            del sys.modules[name]
    gc.freeze()
    gc.disable()  # as the tests have it until they are collected
    line_coverage.save()
    forked.serve(runners)


if __name__ == "__main__":
    collect(
        socket.socket(fileno=int(sys.argv[1])), socket.socket(fileno=int(sys.argv[2])), sys.argv[3:]
    )
