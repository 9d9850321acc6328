"""Real servers, started by commands and stopped by signals."""

from __future__ import annotations

import os
import pty
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tests.support import forked

FREE_PORTS = ("--port", "0", "--management-port", "0", "--metrics-port", "0")
FREE_GRPC_PORTS = ("--set", "enable_grpc=true", "--grpc-port", "0", "--grpc-management-port", "0")
CONTROL = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")  # colours and cursor movements
FreePorts = Callable[[int], list[int]]  # the fixture `free_ports`
DEADLINE = 90.0  # seconds, on a busy machine


@dataclass
class Running:
    """A running server: `lines` are its output until it was ready, `log` is its stderr so far."""

    process: subprocess.Popen[str]
    log_file: Path
    lines: list[str] = field(default_factory=list)

    def address(self, role: str) -> str:
        return next(
            line.partition(" at ")[2] for line in self.lines if line.startswith(f"{role} at ")
        )

    @property
    def log(self) -> str:
        return self.log_file.read_text()

    def stop(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(DEADLINE)


def serving(
    arguments: Sequence[object], cwd: Path, environment: Mapping[str, str]
) -> AbstractContextManager[Running]:
    """Run `tsx` with these arguments in this Python."""
    return started([sys.executable, "-m", "tsx_cli", *map(str, arguments)], cwd, environment)


@contextmanager
def started(
    command: Sequence[str | Path],
    cwd: Path,
    environment: Mapping[str, str],
    *,
    last_line: str = "try: curl",
) -> Iterator[Running]:
    """Start a server, and wait until it has printed the line that begins with `last_line`.

    If the server ends before, an error with its output is raised.
    """
    log_file = cwd / "server.log"
    with log_file.open("w") as log:
        process = forked.Popen(
            command, cwd=cwd, env=clean(environment), stdout=subprocess.PIPE, stderr=log, text=True
        )
    killer = threading.Timer(DEADLINE, process.kill)
    killer.start()
    running = Running(process, log_file)
    try:
        assert process.stdout is not None
        for line in process.stdout:
            running.lines.append(line.rstrip("\n"))
            if line.startswith(last_line):
                break
        else:
            raise AssertionError(
                f"the server ended with {process.wait()}: {running.lines} {running.log}"
            )
        killer.cancel()
        yield running
    finally:
        killer.cancel()
        if process.poll() is None:
            process.kill()
            process.wait()
        if process.stdout is not None:
            process.stdout.close()


def tsx(
    arguments: Sequence[object], cwd: Path, environment: Mapping[str, str]
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end in a separate process."""
    command = [sys.executable, "-m", "tsx_cli", *map(str, arguments)]
    return forked.run(
        command, cwd=cwd, env=clean(environment), capture_output=True, text=True, timeout=DEADLINE
    )


def screen(
    arguments: Sequence[object], cwd: Path, environment: Mapping[str, str], until: str | None = None
) -> tuple[str, int]:
    """Return the output of a command on a terminal, and its exit code.

    Once the text `until` appears, the command gets Ctrl-C.
    """
    own_end, child_end = pty.openpty()
    process = forked.Popen(
        [sys.executable, "-m", "tsx_cli", *map(str, arguments)],
        cwd=cwd,
        env={**clean(environment), "TERM": "xterm"},
        stdin=child_end,
        stdout=child_end,
        stderr=child_end,
    )
    os.close(child_end)
    killer = threading.Timer(DEADLINE, process.kill)
    killer.start()
    output = b""
    try:
        while part := _read(own_end):
            output += part
            if until is not None and until.encode() in output:
                process.send_signal(signal.SIGINT)
                until = None
        return CONTROL.sub("", output.decode()), process.wait()
    finally:
        killer.cancel()
        process.kill()
        process.wait()
        os.close(own_end)


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 65536)
    except OSError:  # Linux raises it once the other end is closed
        return b""


def clean(environment: Mapping[str, str]) -> dict[str, str]:
    """Return this environment without the tester's settings, gRPC and preloaded torch.

    gRPC's ports are fixed unless they are set. Most handlers of tests need no torch, whose import
    takes most of the time of a start.
    """
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("TSX_")}
    return inherited | {
        "COLUMNS": "200",
        "TSX_ENABLE_GRPC": "false",
        "TSX_WORKER_PRELOAD": "false",
        **environment,
    }


def environment_of(pid: int) -> dict[str, str]:
    """Return the environment of a process, which /proc lacks for a moment after exec."""
    end = time.monotonic() + DEADLINE
    while not (variables := psutil.Process(pid).environ()):
        assert time.monotonic() < end
        time.sleep(0.001)
    return variables


def running_children(pid: int, mark: str) -> list[psutil.Process]:
    """Return the running descendants of a process whose command contains the mark."""
    found = []
    for child in psutil.Process(pid).children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # It has ended, and may be a zombie.
            if mark in " ".join(child.cmdline()):
                found.append(child)
    return found
