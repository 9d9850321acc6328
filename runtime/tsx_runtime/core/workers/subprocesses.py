"""Workers that are separate programs.

Each is watched, measured and stopped together with its child processes.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
from collections.abc import Collection, Iterator
from contextlib import suppress

import psutil

from tsx_runtime.core.hidden_credentials import WORKER_DEFAULTS
from tsx_runtime.core.workers.launch import Launch, Sandbox

GROUP_GRACE_S = 5.0  # torchrun notices the end of a process only after a while.


class ProcessState:
    """A process and, if the system supports it, a descriptor that reports its end.

    `alive` is true until `ended` has returned.
    """

    def __init__(self, pid: int, exit_grace: float | None = None) -> None:
        self.pid = pid
        self.exit_grace = exit_grace
        self.alive = True
        self._pidfd = open_pidfd(pid)


class CommandProcess(ProcessState):
    """A program with the interface of a `WorkerProcess`.

    It leads a session, so that Ctrl-C in a terminal does not reach it.
    """

    def __init__(
        self, process: subprocess.Popen[bytes], *, is_group: bool, sandbox: Sandbox | None = None
    ) -> None:
        super().__init__(process.pid, GROUP_GRACE_S if is_group else None)
        self._process = process
        self._is_group = is_group
        self._sandbox = sandbox

    def kill(self) -> None:
        """Kill its process group.

        The ranks of torchrun are in other groups, and end by themselves.
        """
        if self.alive:
            with suppress(ProcessLookupError, PermissionError):  # macOS: the group is empty.
                os.killpg(self.pid, signal.SIGKILL)

    async def ended(self) -> int | None:
        """Wait for the end; return the exit code, or minus a signal's number. Call it only once."""
        if self._pidfd is not None:
            await wait_readable(self._pidfd)
            # Kill the remaining children now: later, another group may have the same number.
            self.kill()
            os.close(self._pidfd)
            code = self._process.wait()
        else:
            code = await asyncio.to_thread(self._process.wait)
        self.alive = False
        if self._sandbox is not None:
            await asyncio.to_thread(self._sandbox.remove)
        return code

    def members(self) -> Iterator[psutil.Process]:
        """Yield the process, and the ranks of its group.

        Raises:
            psutil.Error: The process has ended.
        """
        first = psutil.Process(self.pid)
        yield first
        if self._is_group:
            yield from first.children(recursive=True)


def start_program(
    launch: Launch, max_open_files: int | None, hidden: Collection[str] = ()
) -> tuple[CommandProcess, socket.socket]:
    """Start a worker; return it and the front end's end of its socket.

    Args:
        launch: The program.
        max_open_files: The limit of its open files.
        hidden: Environment variables that it must not see.

    Raises:
        OSError: The program cannot be started.
    """
    if os.name == "nt":
        raise OSError(
            "a worker with packages of its own, or of several processes, needs Linux or macOS"
        )
    sandbox = launch.sandbox
    front, back = socket.socketpair()
    with back:
        try:
            command = launch.command(back.fileno(), max_open_files)
            if sandbox is not None:
                sandbox.create()
                command, variables = (
                    sandbox.command(command),
                    sandbox.environment(launch.variables, hidden),
                )
            else:
                variables = (
                    WORKER_DEFAULTS
                    | {name: value for name, value in os.environ.items() if name not in hidden}
                    | launch.variables
                )
            process = subprocess.Popen(
                command,
                env=variables,
                stdin=subprocess.DEVNULL,
                pass_fds=[back.fileno()],
                start_new_session=True,
            )
        except BaseException:
            front.close()
            if sandbox is not None:
                sandbox.remove()
            raise
    front.setblocking(False)
    return CommandProcess(process, is_group=bool(launch.torchrun), sandbox=sandbox), front


def open_pidfd(pid: int) -> int | None:
    """Return a pidfd, or None if the system has none or the process has ended."""
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):
        return None


async def wait_readable(fd: int, timeout: float | None = None) -> bool:
    """Wait until a descriptor is readable; return False after the timeout."""
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()
    loop.add_reader(fd, _resolve, ready)
    try:
        done, _ = await asyncio.wait([ready], timeout=timeout)
        return bool(done)
    finally:
        loop.remove_reader(fd)


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
