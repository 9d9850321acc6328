"""Workers as threads of this process: for Lambda, which has no shared memory and freezes the
process between requests.

A thread cannot be killed. One that is to be killed loses its socket, and counts as ended; while it
still runs no other is started. One that ends by itself may leave a process behind that is of no
more use to another, as a lost device does. So the owner of the starter asks `stuck` and
`restarted`, and ends the process.
"""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from collections.abc import Collection, Iterator
from contextlib import suppress

import psutil

from tsx_runtime.core.workers.launch import Launch
from tsx_runtime.core.workers.subprocesses import CommandProcess, start_program
from tsx_runtime.worker.launch.entry import run_thread


class WorkerThread:
    """The same as a forked `WorkerProcess`.

    It ends by itself when its socket is closed, once its handler has returned.
    """

    unheard_grace: float | None = None

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
        """Whether it was killed, and runs all the same."""
        return self._killed and self._thread.is_alive()

    def kill(self) -> None:
        self._killed = True
        with suppress(OSError):  # it has closed it
            self._sock.shutdown(socket.SHUT_RDWR)
        self._end(None)

    def members(self) -> Iterator[psutil.Process]:
        """The process that it shares. Raises psutil.Error."""
        yield psutil.Process()

    async def ended(self) -> int | None:
        """Wait for the end: 0, or 1 where it raised, or None where it was killed."""
        return await asyncio.shield(self._ended)

    def _run(self) -> None:
        code = 1
        try:
            run_thread(self._sock, self._hidden)
            code = 0
        finally:
            with suppress(RuntimeError):  # the loop has ended, and with it every waiter
                self._loop.call_soon_threadsafe(self._end, code)

    def _end(self, code: int | None) -> None:
        if not self._ended.done():
            self._ended.set_result(code)


class ThreadStarter:
    """In the place of a `ProcessStarter`.

    A model with packages of its own, or of several processes, still is a program.
    """

    def __init__(self, *, hidden: Collection[str] = ()) -> None:
        """`hidden`: names of environment variables that are none of the workers' business; this
        process loses them too.
        """
        self.hidden = hidden
        self.restarted = False  # a thread has ended by itself, and another was started in its place
        self._threads: list[WorkerThread] = []
        self._programs: list[CommandProcess] = []

    @property
    def stuck(self) -> bool:
        return any(thread.stuck for thread in self._threads)

    def warm_up(self, *, exported: bool = False) -> None:
        """Nothing is forked, so nothing is there to be made ready."""

    async def start(
        self, name: str, launch: Launch | None = None
    ) -> tuple[WorkerThread | CommandProcess, socket.socket]:
        """A new worker and the front end's end of its socket. Raises OSError."""
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
        self.restarted |= (
            newest is not None and not newest.alive
        )  # one that is alive has a successor, which is no restart
        self._threads = [thread for thread in self._threads if thread.alive]
        self._threads.append(WorkerThread(name, back, self.hidden))
        return self._threads[-1], front

    def close(self) -> None:
        for thread in self._threads:
            thread.kill()
        for program in self._programs:
            program.kill()
