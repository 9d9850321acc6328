"""Workers as threads of this process, for Lambda.

Lambda has no shared memory, and freezes the process between requests. A thread cannot be killed: it
loses its socket and counts as ended, but no other worker is started while it runs. A thread that
ends by itself may leave this process unusable, for example with a lost device. Therefore the owner
of the starter checks `stuck` and `restarted`, and ends the process.
"""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil

from tsx_runtime.core.workers.launch import Launch
from tsx_runtime.core.workers.subprocesses import CommandProcess, start_program
from tsx_runtime.worker.launch.entry import run_thread


class WorkerThread:
    """A thread with the interface of a `WorkerProcess`.

    It ends by itself when its socket is closed and its handler has returned.
    """

    exit_grace: float | None = None

    def __init__(self, name: str, sock: socket.socket, hidden: Collection[str]) -> None:
        self.pid = os.getpid()
        self.name = name
        self._sock = sock
        self._hidden = hidden
        self._killed = False
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[int | None] = self._loop.create_future()
        self._thread = threading.Thread(target=self._run, name=f"tsx {name}", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        return not self._ended.done()

    @property
    def stuck(self) -> bool:
        """Whether it still runs although it was killed."""
        return self._killed and self._thread.is_alive()

    def kill(self) -> None:
        self._killed = True
        with suppress(OSError):  # The worker may have closed it.
            self._sock.shutdown(socket.SHUT_RDWR)
        self._end(None)

    def members(self) -> Iterator[psutil.Process]:
        """Yield this process.

        Raises:
            psutil.Error: The process cannot be examined.
        """
        yield psutil.Process()

    async def ended(self) -> int | None:
        """Wait for the end; return 0, or 1 after an error, or None if it was killed."""
        return await asyncio.shield(self._ended)

    def _run(self) -> None:
        code = 1
        try:
            run_thread(self._sock, self._hidden)
            code = 0
        finally:
            with suppress(RuntimeError):  # If the event loop is closed, nobody waits.
                self._loop.call_soon_threadsafe(self._end, code)

    def _end(self, code: int | None) -> None:
        if not self._ended.done():
            self._ended.set_result(code)


class ThreadStarter:
    """Starts workers as threads, with the interface of a `ProcessStarter`.

    A model with its own packages or with several processes is still started as a program.
    """

    def __init__(self, *, hidden: Collection[str] = ()) -> None:
        """Remove the variables `hidden` from the environment of workers and of this process."""
        self.hidden = hidden
        self.restarted = False  # whether a thread has ended by itself and was replaced
        self._threads: list[WorkerThread] = []
        self._programs: list[CommandProcess] = []

    @property
    def stuck(self) -> bool:
        return any(thread.stuck for thread in self._threads)

    def warm_up(self, paths: Iterable[Path]) -> None:
        """Do nothing, since no process is forked."""

    async def start(
        self, name: str, launch: Launch | None = None
    ) -> tuple[WorkerThread | CommandProcess, socket.socket]:
        """Return a new worker and the front end's end of its socket.

        Raises:
            OSError: The worker cannot be started.
        """
        if launch is not None:
            program, front = start_program(launch, None, self.hidden)
            self._programs.append(program)
            return program, front
        if self.stuck:
            raise OSError(
                "the thread of the previous worker is still running; this process must exit"
            )
        front, back = socket.socketpair()
        front.setblocking(False)
        newest = next((thread for thread in reversed(self._threads) if thread.name == name), None)
        # If the newest thread of this name is alive, the new one is its successor, not a restart.
        self.restarted |= newest is not None and not newest.alive
        self._threads = [thread for thread in self._threads if thread.alive]
        self._threads.append(WorkerThread(name, back, self.hidden))
        return self._threads[-1], front

    def close(self) -> None:
        for thread in self._threads:
            thread.kill()
        for program in self._programs:
            program.kill()
