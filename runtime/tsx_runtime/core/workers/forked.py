"""Worker processes, forked from a server that has torch imported, or spawned where fork is not
available.

A worker with packages of its own, or of several processes, is a program instead
(`core/workers/subprocesses.py`).
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import multiprocessing
import multiprocessing.process
import os
import select
import signal
import socket
import sys
import tempfile
import threading
import time
import types
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from multiprocessing import forkserver, resource_tracker, util
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from typing import Any, Protocol

import psutil

from tsx_runtime.core.isolation.hidden_credentials import starting_without
from tsx_runtime.core.workers.launch import Launch
from tsx_runtime.core.workers.subprocesses import (
    CommandProcess,
    ProcessState,
    open_pidfd,
    readable,
    start_program,
)
from tsx_runtime.shared.safe_path import CLEAN
from tsx_runtime.shared.socket_paths import socket_directory
from tsx_runtime.worker.launch.entry import run

PRELOAD = "tsx_runtime.worker.launch.preload"
# a second longer, so only where it is known to be wanted
PRELOAD_EXPORTED = "tsx_runtime.worker.launch.preload_export"
REPORT_GRACE = 5.0  # seconds that the fork server may take to tell how a worker has ended
START_TIMEOUT = (
    300.0  # seconds that a start may take: most of it is for importing torch from a slow disk
)
LOOK = 2.0  # seconds between looks at a start that takes long

logger = logging.getLogger("tsx.processes")


class Process(Protocol):
    """The interface of a worker's process, or of a thread in its place."""

    pid: int
    unheard_grace: float | None

    @property
    def alive(self) -> bool: ...

    def kill(self) -> None: ...

    def members(self) -> Iterator[psutil.Process]: ...

    async def ended(self) -> int | None: ...


class WorkerProcess(ProcessState):
    """One process. It ends by itself when its socket is closed.

    On Linux its end is reported by a descriptor of the process itself: the pipe that
    multiprocessing has for it would also end with the fork server, whose death no worker needs to
    share.
    """

    def __init__(self, process: BaseProcess, forked: bool) -> None:
        assert process.pid is not None
        super().__init__(process.pid)
        self._process = process
        self._forked = forked

    def kill(self) -> None:
        if not self.alive:
            return
        if self._pidfd is None:
            self._process.kill()
        else:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def members(self) -> Iterator[psutil.Process]:
        """Itself: a worker's programs are its handler's business. Raises psutil.Error."""
        yield psutil.Process(self.pid)

    async def ended(self) -> int | None:
        """Wait for the end: the exit code, minus the signal's number, or None where it could not be
        seen. To be called once.
        """
        if self._pidfd is not None:
            await readable(self._pidfd)
        reported = await readable(
            self._process.sentinel, REPORT_GRACE if self._pidfd is not None else None
        )
        code = self._exit_code() if reported else None
        self._release()
        return code

    def _exit_code(self) -> int | None:
        """Its parent knows: where that is the fork server, it tells on the sentinel, or is dead
        itself.
        """
        if not self._forked:
            self._process.join()
            return self._process.exitcode
        try:
            return int(forkserver.read_signed(self._process.sentinel))
        except EOFError:
            return _exit_code_of_orphan(self.pid)

    def _release(self) -> None:
        """Give back its descriptors now, not when the garbage is collected."""
        self.alive = False
        if self._pidfd is not None:
            os.close(self._pidfd)
        with suppress(ValueError):  # its fork server hangs: then the garbage collector does it
            self._process.close()


class Starter(Protocol):
    """The interface that starts workers."""

    hidden: Collection[str]  # environment variables that are none of the workers' business

    def warm_up(self, *, exported: bool = False) -> None: ...

    async def start(
        self, name: str, launch: Launch | None = None
    ) -> tuple[Process, socket.socket]: ...

    def close(self) -> None: ...


class ProcessStarter:
    """Starts workers.

    Holds the one thread in which that may block: the first start waits for the fork server to
    import torch.
    """

    def __init__(
        self, *, preload: bool = True, worker_files: int | None = None, hidden: Collection[str] = ()
    ) -> None:
        """`hidden`: names of environment variables that are none of the workers' business."""
        method = (
            "forkserver"
            if "forkserver" in multiprocessing.get_all_start_methods() and sys.platform == "linux"
            else "spawn"
        )
        self._context: BaseContext = multiprocessing.get_context(method)
        self._forks = method == "forkserver"
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tsx-start")
        self._alive: set[WorkerProcess | CommandProcess] = set()
        self._lock = (
            threading.Lock()
        )  # of that set: forks and programs are started in different threads
        self._preload = preload
        self._worker_files = worker_files
        self.hidden = hidden
        self._began: float | None = None  # when the start that is under way began
        if self._forks:
            _have_room_for_sockets()
            self._set_preload(exported=False)
        atexit.register(
            self._kill_all
        )  # runs before multiprocessing's own, which would wait for them

    def warm_up(self, *, exported: bool = False) -> None:
        """Start the fork server now, so that it imports torch while the front end starts.

        `exported`: for `.pt2` models.
        """
        if self._forks:
            self._set_preload(exported)
            self._thread.submit(_ensure_fork_server, self.hidden)

    def _set_preload(self, exported: bool) -> None:
        modules = [PRELOAD_EXPORTED if exported else PRELOAD] if self._preload else []
        self._context.set_forkserver_preload(modules)

    async def start(
        self, name: str, launch: Launch | None = None
    ) -> tuple[WorkerProcess | CommandProcess, socket.socket]:
        """A new worker and the front end's end of its socket.

        Raises OSError or EOFError. `launch`: as a program of its own.
        """
        if launch is not None:
            if launch.sandbox is None:
                program, front = start_program(launch, self._worker_files, self.hidden)
            # cgroups and directories are made, which may block; the thread lives as long as the
            # workers, whose parent it is
            else:
                loop = asyncio.get_running_loop()
                program, front = await loop.run_in_executor(
                    self._thread, start_program, launch, self._worker_files, self.hidden
                )
            self._keep(program)
            return program, front
        starting = asyncio.get_running_loop().run_in_executor(self._thread, self._start, name)
        stopped = 0
        while not starting.done():
            await asyncio.wait([starting], timeout=LOOK)
            stopped = stopped + 1 if not starting.done() and _fork_server_is_stopped() else 0
            if stopped > 1 or (
                self._began is not None and time.monotonic() - self._began > START_TIMEOUT
            ):
                _kill_fork_server()
        return await starting

    def close(self) -> None:
        self._thread.shutdown()
        self._kill_all()
        atexit.unregister(self._kill_all)

    def _start(self, name: str) -> tuple[WorkerProcess, socket.socket]:
        try:
            return self._start_once(name)
        except (EOFError, ConnectionError):  # the fork server died under it: another one will do
            if not self._forks:
                raise
            _wait_for_end(_fork_server_pid())
            return self._start_once(name)

    def _start_once(self, name: str) -> tuple[WorkerProcess, socket.socket]:
        self._began = time.monotonic()
        try:
            if self._forks:
                _ensure_fork_server(self.hidden)
            front, back = socket.socketpair()
            with back:
                try:
                    started = self._start_process(name, back)
                except BaseException:
                    front.close()
                    raise
        finally:
            self._began = None
        front.setblocking(False)
        self._keep(started)
        return started, front

    def _keep(self, process: WorkerProcess | CommandProcess) -> None:
        with self._lock:
            self._alive = {each for each in self._alive if each.alive} | {process}

    def _start_process(self, name: str, back: socket.socket) -> WorkerProcess:
        args = (back, self._worker_files, self.hidden)
        process = self._context.Process(target=run, args=args, name=name)  # type: ignore[attr-defined]  # typeshed: on subclasses
        with _no_main(), _started_clean(self.hidden):
            process.start()
        # multiprocessing would look at it from this thread at the next start, and take its exit
        # code from under the event loop
        multiprocessing.process._children.discard(process)  # type: ignore[attr-defined]  # private
        return WorkerProcess(process, self._forks)

    def _kill_all(self) -> None:
        for process in self._alive:
            process.kill()


def _have_room_for_sockets() -> None:
    """Multiprocessing chooses the directory of its sockets once, without a look at how long their
    paths will be.
    """
    place = socket_directory()
    if place != tempfile.gettempdir():
        usual, tempfile.tempdir = tempfile.tempdir, place
        try:
            util.get_temp_dir()
        finally:
            tempfile.tempdir = usual


def _ensure_fork_server(hidden: Collection[str] = ()) -> None:
    """With both stops held back, since a terminal and a service manager send them to every process
    of the server.

    SIGINT: multiprocessing ignores it only once torch is imported, and until then it is a
    traceback. SIGTERM would end the fork server, and with it the workers, while the front end still
    has requests to answer; it ends by itself when the front end has. What the fork server starts
    inherits this; a worker lets go of it once it ignores both itself.
    """
    with _started_clean(hidden):
        resource_tracker.ensure_running()  # it would let signals through again
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT, signal.SIGTERM])
    try:
        with _started_clean(hidden):
            forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _started_clean(hidden: Collection[str]) -> Iterator[None]:
    """What multiprocessing starts meanwhile has no hidden variables and does not import from the
    working directory.
    """
    with (
        starting_without(hidden, os.environ),
        _without_working_directory(),
    ):  # in this order: the second one calls the first
        yield


@contextmanager
def _without_working_directory() -> Iterator[None]:
    """What multiprocessing starts meanwhile is a program of `-c`, which would import from the
    working directory before all else.
    """
    start = util.spawnv_passfds

    def start_clean(path: bytes, args: Sequence[Any], passfds: Sequence[int]) -> int:
        words = list(args)
        at = words.index("-c") + 1
        words[at] = CLEAN + words[at]
        return start(path, words, passfds)

    util.spawnv_passfds = start_clean
    try:
        yield
    finally:
        util.spawnv_passfds = start


@contextmanager
def _no_main() -> Iterator[None]:
    """Hide `__main__`: multiprocessing would import the program that started us into every
    worker.
    """
    with _main_lock:
        main = sys.modules["__main__"]
        sys.modules["__main__"] = types.ModuleType("__main__")
        try:
            yield
        finally:
            sys.modules["__main__"] = main


def _fork_server_is_stopped() -> bool:
    """Whether a SIGSTOP was sent to it: no worker starts until it goes on."""
    pid = _fork_server_pid()
    try:
        return pid is not None and psutil.Process(pid).status() == psutil.STATUS_STOPPED
    except (psutil.Error, OSError):
        return False


def _kill_fork_server() -> None:
    """The start that waits for it fails, and the next one has a fork server of its own.

    Workers that run do not notice.
    """
    if (pid := _fork_server_pid()) is not None:
        logger.error("the fork server (pid %d) does not answer, so it is restarted", pid)
        os.kill(pid, signal.SIGKILL)  # ours, and not waited for yet: the number is still its own


def _fork_server_pid() -> int | None:
    return getattr(getattr(forkserver, "_forkserver", None), "_forkserver_pid", None)


def _wait_for_end(pid: int | None) -> None:
    """It is about to end: multiprocessing makes a new one only of a process that has."""
    fd = None if pid is None else open_pidfd(pid)
    if fd is not None:
        poller = select.poll()
        poller.register(fd, select.POLLIN)
        poller.poll(1000 * REPORT_GRACE)
        os.close(fd)


def _exit_code_of_orphan(pid: int) -> int | None:
    """An orphan goes to the first process of a container, which may be this one."""
    try:
        found, status = os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        return None
    return os.waitstatus_to_exitcode(status) if found else None


_main_lock = threading.Lock()
