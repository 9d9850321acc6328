"""A worker that is a separate program, with its child processes: watched, measured and stopped
together.
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

from tsx_runtime.core.isolation.config import Sandbox
from tsx_runtime.core.isolation.hidden_credentials import WORKER_DEFAULTS
from tsx_runtime.core.workers.launch import Launch

GROUP_GRACE = (
    5.0  # seconds: torchrun looks at its processes from time to time, then ends the others
)


class ProcessState:
    """A process and, where the system has one, a descriptor that tells its end.

    `alive` is true until its end was waited for.
    """

    def __init__(self, pid: int, unheard_grace: float | None = None) -> None:
        self.pid = pid
        self.unheard_grace = unheard_grace
        self.alive = True
        self._pidfd = open_pidfd(pid)


class CommandProcess(ProcessState):
    """The same as a forked `WorkerProcess`, for a program.

    It leads a session, so no terminal's Ctrl-C reaches it.
    """

    def __init__(
        self, process: subprocess.Popen[bytes], *, is_group: bool, sandbox: Sandbox | None = None
    ) -> None:
        super().__init__(process.pid, GROUP_GRACE if is_group else None)
        self._process = process
        self._is_group = is_group
        self._sandbox = sandbox

    def kill(self) -> None:
        """Its process group; the ranks of a torchrun, which have groups of their own, see to it
        themselves that they end with it.
        """
        if self.alive:
            with suppress(ProcessLookupError, PermissionError):  # macOS: no process is left in it
                os.killpg(self.pid, signal.SIGKILL)

    async def ended(self) -> int | None:
        """Wait for the end: the exit code, minus the signal's number. To be called once."""
        if self._pidfd is not None:
            await readable(self._pidfd)
            self.kill()  # what it has left behind, while its number is still its own
            os.close(self._pidfd)
            code = self._process.wait()
        else:
            code = await asyncio.to_thread(self._process.wait)
        self.alive = False
        if self._sandbox is not None:
            await asyncio.to_thread(self._sandbox.remove)
        return code

    def members(self) -> Iterator[psutil.Process]:
        """Itself, and the ranks of its group. Raises psutil.Error."""
        first = psutil.Process(self.pid)
        yield first
        if self._is_group:
            yield from first.children(recursive=True)


def start_program(
    launch: Launch, files: int | None, hidden: Collection[str] = ()
) -> tuple[CommandProcess, socket.socket]:
    """A worker and the front end's end of its socket.

    `hidden`: variables that it must not have. Raises OSError.
    """
    if os.name == "nt":
        raise OSError(
            "a worker with packages of its own, or of several processes, needs Linux or macOS"
        )
    sandbox = launch.sandbox
    front, back = socket.socketpair()
    with back:
        try:
            command = launch.command(back.fileno(), files)
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
    """A descriptor that stands for the process; None where the system has none, or the process is
    gone already.
    """
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):
        return None


async def readable(fd: int, timeout: float | None = None) -> bool:
    """Whether it was in time."""
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
