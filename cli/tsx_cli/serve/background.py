"""The background server of `torchserve`: its process, its pid file, its stop."""

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

# SageMaker's toolkit finds the server by this argument, and `--stop` checks it.
MARK = "org.pytorch.serve.ModelServer"
START_TIMEOUT_S = 60.0  # time between a server's addresses and its first response
STOP_TIMEOUT_S = 300.0  # time to answer accepted requests

# With `-m`, a file of the working directory could replace a module of tsx or of Python.
_MAIN = CLEAN + "from tsx_cli.serve.torchserve import main; sys.exit(main())"


class AlreadyRunning(Exception):
    """Another server holds the pid file."""


def pid_file() -> Path:
    """Return TorchServe's path of the pid file, so that `--stop` of both finds either server."""
    return Path(tempfile.gettempdir(), ".model_server.pid")


def find_server(file: Path) -> psutil.Process | None:
    """Return the process of the pid file, if it is a model server of this user.

    Process ids are reused, and anybody may write to /tmp.
    """
    try:
        process = psutil.Process(_own_pid(file))
        ours = not hasattr(os, "getuid") or process.uids().real == os.getuid()
        return process if ours and MARK in process.cmdline() else None
    except (OSError, ValueError, psutil.Error):
        return None


def _own_pid(file: Path) -> int:
    """Read a pid file.

    Raises:
        OSError: The file is missing, or belongs to another user.
        ValueError: The file holds no number.
    """
    with open(
        os.open(file, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)),
        encoding="ascii",
    ) as open_file:
        if hasattr(os, "getuid") and os.fstat(open_file.fileno()).st_uid != os.getuid():
            raise PermissionError(f"{file} belongs to another user")
        return int(open_file.read(32))


def remove_orphan(file: Path) -> bool:
    """Remove this user's pid file if its process is no model server, and tell whether it was."""
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
    except psutil.NoSuchProcess:  # It has ended, or is a zombie.
        return []


@contextmanager
def claimed(file: Path) -> Iterator[None]:
    """Hold this process's number in the pid file.

    Raises:
        AlreadyRunning: Another server holds the file.
        OSError: The file cannot be written.
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
            server = find_server(file)
            if server is not None and server.pid != os.getpid():
                raise AlreadyRunning from None
            with suppress(FileNotFoundError):
                file.unlink()  # Its server ended without removing it.
            continue
        with open(descriptor, "w", encoding="ascii") as open_file:
            open_file.write(str(os.getpid()))
        return
    raise AlreadyRunning


def command(arguments: Sequence[str]) -> list[str]:
    """Return the command of a server's process."""
    return [sys.executable, "-c", _MAIN, MARK, *arguments]


def become_server(arguments: Sequence[str]) -> int:
    """Run the server in this process and terminal, if the system can."""
    if sys.platform == "win32":
        return subprocess.call(command(arguments))
    sys.stdout.flush()
    sys.stderr.flush()
    return os.execv(sys.executable, command(arguments))


def leave_running(arguments: Sequence[str]) -> int:
    """Start the server in the background, and return 0 once it answers, or its exit code.

    A server with addresses that still reads archives after START_TIMEOUT_S is not waited for. It
    prints to this process's terminal, as TorchServe does, because programs wait for its lines.
    """
    ours, theirs = os.pipe()
    with open(ours, "rb", buffering=0) as log:
        try:
            process = subprocess.Popen(
                command(["--tell", str(theirs), *arguments]),
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                pass_fds=[theirs],
            )
        finally:
            os.close(theirs)
        if log.read(1) and (not select.select([log], [], [], START_TIMEOUT_S)[0] or log.read(1)):
            process.returncode = 0  # Python would warn of a child that is not waited for.
            return 0
    return process.wait()


def teller(descriptor: int | None) -> Callable[[], None]:
    """Return a function that the server calls when it has its addresses, and when it answers."""
    if descriptor is None:
        return lambda: None
    os.set_inheritable(descriptor, False)

    def tell() -> None:
        with suppress(OSError):  # The starting process has ended.
            os.write(descriptor, b"1")

    return tell


def end_server(process: psutil.Process) -> bool:
    """Ask the server to stop, and tell whether it ended in time.

    It first answers what it has accepted.
    """
    try:
        with _ending(process) as ended:
            process.terminate()
            return ended()
    except (psutil.NoSuchProcess, ProcessLookupError):
        return True


@contextmanager
def _ending(process: psutil.Process) -> Iterator[Callable[[], bool]]:
    """Yield a function that waits for the end of a process, and tells whether it came.

    In a container, the process may remain as a zombie.
    """
    if not hasattr(os, "pidfd_open"):
        yield lambda: not psutil.wait_procs([process], STOP_TIMEOUT_S)[1]
        return
    descriptor = os.pidfd_open(process.pid)
    try:
        yield lambda: bool(select.select([descriptor], [], [], STOP_TIMEOUT_S)[0])
    finally:
        os.close(descriptor)
