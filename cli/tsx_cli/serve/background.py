"""The background server of `torchserve`: its process, its pid file, its stop (contract 4.3)."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from tsx_runtime.shared.safe_path import CLEAN

# SageMaker's toolkit looks for the one process that has this word among its arguments, and `--stop`
# does before it ends anything.
MARK = "org.pytorch.serve.ModelServer"
# seconds that a server may take from its addresses to its first answer before `--start` returns
START_PATIENCE = 60.0
PATIENCE = 300.0  # seconds that a stopping server may take to answer what it has accepted

# No `-m`: that would let a file of the working directory stand before tsx's own modules, and before
# Python's.
_MAIN = CLEAN + "from tsx_cli.serve.torchserve import main; sys.exit(main())"


class AlreadyRunning(Exception):
    """Another server holds the pid file."""


def pid_file() -> Path:
    """Where TorchServe has it, so that either's `--stop` finds what the other has started."""
    return Path(tempfile.gettempdir(), ".model_server.pid")


def find_server(file: Path) -> psutil.Process | None:
    """The process that the file names, if it is this user's, and a model server: numbers are used
    again, and anybody may write to /tmp.
    """
    try:
        process = psutil.Process(_own_pid(file))
        ours = not hasattr(os, "getuid") or process.uids().real == os.getuid()
        return process if ours and MARK in process.cmdline() else None
    except (OSError, ValueError, psutil.Error):
        return None


def _own_pid(file: Path) -> int:
    """What is in it. Raises OSError, also where it is another user's, and ValueError."""
    with open(
        os.open(file, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)),
        encoding="ascii",
    ) as open_file:
        if hasattr(os, "getuid") and os.fstat(open_file.fileno()).st_uid != os.getuid():
            raise PermissionError(f"{file} belongs to another user")
        return int(open_file.read(32))


def remove_orphan(file: Path) -> bool:
    """Remove this user's pid file if no process has its number, or one that is no model server.

    Whether it was one.
    """
    try:
        if MARK in _command_line(_own_pid(file)):
            return False
        file.unlink()
    except (OSError, ValueError, psutil.Error):
        return False
    return True


def _command_line(pid: int) -> list[str]:
    try:
        return psutil.Process(pid).cmdline()
    except psutil.NoSuchProcess:  # or a zombie
        return []


@contextmanager
def claimed(file: Path) -> Iterator[None]:
    """Have this process's number in the file.

    Raises AlreadyRunning, and OSError where it cannot be written.
    """
    _claim(file)
    try:
        yield
    finally:
        with suppress(OSError, ValueError):
            if int(file.read_text("ascii")) == os.getpid():
                file.unlink()


def _claim(file: Path) -> None:
    for _ in range(2):
        try:
            descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        except FileExistsError:
            found = find_server(file)
            if found is not None and found.pid != os.getpid():
                raise AlreadyRunning from None
            with suppress(FileNotFoundError):
                file.unlink()  # of one that ended without a word
            continue
        with open(descriptor, "w", encoding="ascii") as open_file:
            open_file.write(str(os.getpid()))
        return
    raise AlreadyRunning


def command(words: Sequence[str]) -> list[str]:
    """What a server's process is started as."""
    return [sys.executable, "-c", _MAIN, MARK, *words]


def become_server(words: Sequence[str]) -> int:
    """In this process and terminal, where the system can."""
    if sys.platform == "win32":
        return subprocess.call(command(words))
    sys.stdout.flush()
    sys.stderr.flush()
    return os.execv(sys.executable, command(words))


def leave_running(words: Sequence[str]) -> int:
    """Start it beside this process; return 0 once it answers, or the code with which it ended
    before.

    A server that has its addresses and still reads archives after `START_PATIENCE` is not waited
    for. It writes where this process does, as TorchServe does: programs wait for its lines.
    """
    ours, theirs = os.pipe()
    with open(ours, "rb", buffering=0) as log:
        try:
            process = subprocess.Popen(
                command(["--tell", str(theirs), *words]),
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                pass_fds=[theirs],
            )
        finally:
            os.close(theirs)
        if log.read(1) and (not select.select([log], [], [], START_PATIENCE)[0] or log.read(1)):
            process.returncode = 0  # or Python would warn of a child that is not waited for
            return 0
    return process.wait()


def teller(descriptor: int | None) -> Callable[[], None]:
    """Return what the server calls when it has its addresses, and again when it answers."""
    if descriptor is None:
        return lambda: None
    os.set_inheritable(descriptor, False)

    def tell() -> None:
        with suppress(OSError):  # the starting process has gone
            os.write(descriptor, b"1")

    return tell


def end_server(process: psutil.Process) -> bool:
    """Ask it to stop, and wait until it has answered what it has accepted; false if it takes too
    long for that.
    """
    try:
        with _ending(process) as ended:
            process.terminate()
            return ended()
    except (psutil.NoSuchProcess, ProcessLookupError):
        return True


@contextmanager
def _ending(process: psutil.Process) -> Iterator[Callable[[], bool]]:
    """What waits for its end.

    In a container it may be a zombie from then on: not every first process looks after orphans.
    """
    if not hasattr(os, "pidfd_open"):
        yield lambda: not psutil.wait_procs([process], PATIENCE)[1]
        return
    descriptor = os.pidfd_open(process.pid)
    try:
        yield lambda: bool(select.select([descriptor], [], [], PATIENCE)[0])
    finally:
        os.close(descriptor)
