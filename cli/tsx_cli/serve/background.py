"""The background server of `torchserve`: its process, its pid file, and how it is stopped."""

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
START_TIMEOUT_S = 60.0  # limit for the time between listening and the first response
STOP_TIMEOUT_S = 300.0  # limit for answering accepted requests

# With `-m`, a file in the working directory could shadow a module of tsx or of Python.
_MAIN = CLEAN + "from tsx_cli.serve.torchserve import main; sys.exit(main())"


class AlreadyRunning(Exception):
    """Another server owns the pid file."""


def pid_file() -> Path:
    """Return the path of TorchServe's pid file.

    It is shared, so that `--stop` of either program finds the server of the other.
    """
    return Path(tempfile.gettempdir(), ".model_server.pid")


def find_server(file: Path) -> psutil.Process | None:
    """Return the process of the pid file, if it is a model server of this user.

    This is checked because process ids are reused, and because anybody may write to /tmp.
    """
    try:
        process = psutil.Process(_own_pid(file))
        is_own = not hasattr(os, "getuid") or process.uids().real == os.getuid()
        return process if is_own and MARK in process.cmdline() else None
    except (OSError, ValueError, psutil.Error):
        return None


def _own_pid(file: Path) -> int:
    """Read a pid file of this user.

    Raises:
        OSError: The file is missing, or belongs to another user.
        ValueError: The file contains no number.
    """
    with open(
        os.open(file, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)),
        encoding="ascii",
    ) as open_file:
        if hasattr(os, "getuid") and os.fstat(open_file.fileno()).st_uid != os.getuid():
            raise PermissionError(f"{file} belongs to another user")
        return int(open_file.read(32))


def remove_orphan(file: Path) -> bool:
    """Remove this user's pid file if its process is not a model server.

    Return whether it was removed.
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
    except psutil.NoSuchProcess:  # The process has ended, or is a zombie.
        return []


@contextmanager
def claim_pid_file(file: Path) -> Iterator[None]:
    """Keep this process's id in the pid file for the duration of the context.

    Raises:
        AlreadyRunning: Another server owns the file.
        OSError: The file cannot be written.
    """
    _write_pid(file)
    try:
        yield
    finally:
        with suppress(OSError, ValueError):
            if int(file.read_text("ascii")) == os.getpid():
                file.unlink()


def _write_pid(file: Path) -> None:
    for _ in range(2):
        try:
            descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        except FileExistsError:
            server = find_server(file)
            if server is not None and server.pid != os.getpid():
                raise AlreadyRunning from None
            with suppress(FileNotFoundError):
                file.unlink()  # The server of this file ended without removing it.
            continue
        with open(descriptor, "w", encoding="ascii") as open_file:
            open_file.write(str(os.getpid()))
        return
    raise AlreadyRunning


def command(arguments: Sequence[str]) -> list[str]:
    """Return the command line of a server's process."""
    return [sys.executable, "-c", _MAIN, MARK, *arguments]


def become_server(arguments: Sequence[str]) -> int:
    """Replace this process by the server; on Windows, run the server in a child."""
    if sys.platform == "win32":
        return subprocess.call(command(arguments))
    sys.stdout.flush()
    sys.stderr.flush()
    return os.execv(sys.executable, command(arguments))


def start_in_background(arguments: Sequence[str]) -> int:
    """Start the server in the background. Return 0 once it answers, or its exit code.

    If a server listens but still reads archives after START_TIMEOUT_S, this returns 0 too. The
    server prints to this process's terminal, as TorchServe does, because programs wait for its
    lines.
    """
    reader, writer = os.pipe()
    with open(reader, "rb", buffering=0) as log:
        try:
            process = subprocess.Popen(
                command(["--tell", str(writer), *arguments]),
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                pass_fds=[writer],
            )
        finally:
            os.close(writer)
        if log.read(1) and (not select.select([log], [], [], START_TIMEOUT_S)[0] or log.read(1)):
            process.returncode = 0  # Otherwise Python warns of a child that was not waited for.
            return 0
    return process.wait()


def start_notifier(descriptor: int | None) -> Callable[[], None]:
    """Return a function that reports progress to the starting process.

    The server calls it once when it listens, and again when it answers.
    """
    if descriptor is None:
        return lambda: None
    os.set_inheritable(descriptor, False)

    def tell() -> None:
        with suppress(OSError):  # The starting process may have ended.
            os.write(descriptor, b"1")

    return tell


def end_server(process: psutil.Process) -> bool:
    """Ask the server to stop; return whether it ended in time.

    It first answers the accepted requests.
    """
    try:
        with _exit_watcher(process) as has_ended:
            process.terminate()
            return has_ended()
    except (psutil.NoSuchProcess, ProcessLookupError):
        return True


@contextmanager
def _exit_watcher(process: psutil.Process) -> Iterator[Callable[[], bool]]:
    """Yield a function that waits for the end of a process, and returns whether it ended in time.

    The process may remain as a zombie in a container; that counts as its end.
    """
    if not hasattr(os, "pidfd_open"):
        yield lambda: not psutil.wait_procs([process], STOP_TIMEOUT_S)[1]
        return
    descriptor = os.pidfd_open(process.pid)
    try:
        yield lambda: bool(select.select([descriptor], [], [], STOP_TIMEOUT_S)[0])
    finally:
        os.close(descriptor)
