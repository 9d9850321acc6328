"""Real servers, started as a person starts them and stopped as the system stops them."""

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
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tests.support import forked

FREE_PORTS = ("--port", "0", "--management-port", "0", "--metrics-port", "0")
FREE_GRPC_PORTS = ("--set", "enable_grpc=true", "--grpc-port", "0", "--grpc-management-port", "0")
CONTROL = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")  # colours and the moves of the cursor
FreePorts = Callable[[int], list[int]]  # the fixture `free_ports`
DEADLINE = 90.0  # seconds, on a busy machine


@dataclass
class Running:
    """A server that answers: `lines` are its output until then, `log` is its stderr so far."""

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
    """Start `tsx` with these arguments, in this Python."""
    return started([sys.executable, "-m", "tsx_cli", *map(str, arguments)], cwd, environment)


@contextmanager
def started(
    command: Sequence[str | Path],
    cwd: Path,
    environment: Mapping[str, str],
    *,
    last_line: str = "try: curl",
) -> Iterator[Running]:
    """Start a server and wait until it has printed the line that begins with `last_line`.

    A server that ends before is an error, with its output.
    """
    log_file = cwd / "server.log"
    with log_file.open("w") as log:
        process = forked.Popen(
            command, cwd=cwd, env=clean(environment), stdout=subprocess.PIPE, stderr=log, text=True
        )
    late = threading.Timer(DEADLINE, process.kill)
    late.start()
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
        late.cancel()
        yield running
    finally:
        late.cancel()
        if process.poll() is None:
            process.kill()
            process.wait()
        if process.stdout is not None:
            process.stdout.close()


def tsx(
    arguments: Sequence[object], cwd: Path, environment: Mapping[str, str]
) -> subprocess.CompletedProcess[str]:
    """Run a command that ends by itself, in a process of its own."""
    command = [sys.executable, "-m", "tsx_cli", *map(str, arguments)]
    return forked.run(
        command, cwd=cwd, env=clean(environment), capture_output=True, text=True, timeout=DEADLINE
    )


def screen(
    arguments: Sequence[object], cwd: Path, environment: Mapping[str, str], until: str | None = None
) -> tuple[str, int]:
    """Return the output of a command on a terminal, and its exit code.

    Once the text `until` is there, the command gets Ctrl-C.
    """
    ours, theirs = pty.openpty()
    process = forked.Popen(
        [sys.executable, "-m", "tsx_cli", *map(str, arguments)],
        cwd=cwd,
        env={**clean(environment), "TERM": "xterm"},
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
    )
    os.close(theirs)
    late = threading.Timer(DEADLINE, process.kill)
    late.start()
    seen = b""
    try:
        while part := _read(ours):
            seen += part
            if until is not None and until.encode() in seen:
                process.send_signal(signal.SIGINT)
                until = None
        return CONTROL.sub("", seen.decode()), process.wait()
    finally:
        late.cancel()
        process.kill()
        process.wait()
        os.close(ours)


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 65536)
    except OSError:  # Linux's answer once the other end is closed
        return b""


def clean(environment: Mapping[str, str]) -> dict[str, str]:
    """Return this environment without the tester's settings, without gRPC and preloaded torch.

    gRPC's ports are fixed unless they are named. Most handlers of tests need no torch, and its
    import takes the largest part of a start.
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
