"""Worker processes, which are forked from a server that has imported torch, or else spawned.

A worker with its own packages or with several processes is a program instead
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
from collections.abc import Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from multiprocessing import forkserver, resource_tracker, util
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Protocol

import psutil

from tsx_runtime.core.hidden_credentials import hidden_from_children
from tsx_runtime.core.workers.launch import Launch
from tsx_runtime.core.workers.preload import PRELOAD, preload_for
from tsx_runtime.core.workers.subprocesses import (
    CommandProcess,
    ProcessState,
    open_pidfd,
    start_program,
    wait_readable,
)
from tsx_runtime.shared.safe_path import CLEAN
from tsx_runtime.shared.socket_paths import socket_directory
from tsx_runtime.worker.launch.entry import run

REPORT_GRACE_S = 5.0  # limit for the fork server to report a worker's end
START_TIMEOUT_S = 300.0  # enough to import torch from a slow disk
START_CHECK_S = 2.0  # pause between two checks of a slow start

logger = logging.getLogger("tsx.processes")


class Process(Protocol):
    """The interface of a worker's process, or of a thread that replaces it."""

    pid: int
    exit_grace: float | None

    @property
    def alive(self) -> bool: ...

    def kill(self) -> None: ...

    def members(self) -> Iterator[psutil.Process]: ...

    async def ended(self) -> int | None: ...


class WorkerProcess(ProcessState):
    """A worker's process. It ends by itself when its socket is closed.

    On Linux a pidfd reports its end. multiprocessing's own pipe would also close with the fork
    server, although the workers continue without it.
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
        """Yield the process, without the programs that its handler runs.

        Raises:
            psutil.Error: The process has ended.
        """
        yield psutil.Process(self.pid)

    async def ended(self) -> int | None:
        """Wait for the end; return the exit code, or minus a signal's number, or None.

        None means that the code is unknown. Call it only once.
        """
        if self._pidfd is not None:
            await wait_readable(self._pidfd)
        is_reported = await wait_readable(
            self._process.sentinel, REPORT_GRACE_S if self._pidfd is not None else None
        )
        code = self._exit_code() if is_reported else None
        self._release()
        return code

    def _exit_code(self) -> int | None:
        """Return the exit code from the parent process.

        A fork server reports it on the sentinel, unless it has ended itself.
        """
        if not self._forked:
            self._process.join()
            return self._process.exitcode
        try:
            return int(forkserver.read_signed(self._process.sentinel))
        except EOFError:
            return _exit_code_of_orphan(self.pid)

    def _release(self) -> None:
        """Close its descriptors now instead of in the garbage collector."""
        self.alive = False
        if self._pidfd is not None:
            os.close(self._pidfd)
        # If the fork server hangs, this fails, and the garbage collector closes it.
        with suppress(ValueError):
            self._process.close()


class Starter(Protocol):
    """The interface of what starts workers."""

    hidden: Collection[str]  # environment variables that workers do not get

    def warm_up(self, paths: Iterable[Path]) -> None: ...

    async def start(
        self, name: str, launch: Launch | None = None
    ) -> tuple[Process, socket.socket]: ...

    def close(self) -> None: ...


class ProcessStarter:
    """Starts workers as processes.

    Its only thread may block: the first start waits until the fork server has imported torch.
    """

    def __init__(
        self, *, preload: bool = True, worker_files: int | None = None, hidden: Collection[str] = ()
    ) -> None:
        """Remove the environment variables `hidden` from the workers."""
        method = (
            "forkserver"
            if "forkserver" in multiprocessing.get_all_start_methods() and sys.platform == "linux"
            else "spawn"
        )
        self._context: BaseContext = multiprocessing.get_context(method)
        self._forks = method == "forkserver"
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tsx-start")
        self._alive: set[WorkerProcess | CommandProcess] = set()
        # The lock protects `_alive`, since forks and programs are started in different threads.
        self._lock = threading.Lock()
        self._preload = preload
        self._worker_files = worker_files
        self.hidden = hidden
        self._start_time: float | None = None  # time.monotonic() of the current start
        if self._forks:
            _choose_short_socket_directory()
            self._set_preload(PRELOAD)
        # multiprocessing's own exit function waits for the workers. This one runs before it.
        atexit.register(self._kill_all)

    def warm_up(self, paths: Iterable[Path]) -> None:
        """Start the fork server, so that it imports torch while the front end starts.

        It also imports what the models in `paths` need.
        """
        if self._forks:
            self._set_preload(preload_for(paths))
            self._thread.submit(_ensure_fork_server, self.hidden)

    def _set_preload(self, module: str) -> None:
        self._context.set_forkserver_preload([module] if self._preload else [])

    async def start(
        self, name: str, launch: Launch | None = None
    ) -> tuple[WorkerProcess | CommandProcess, socket.socket]:
        """Start a worker; return it and the front end's end of its socket.

        Args:
            name: The name of the process.
            launch: The program to start instead of a fork.

        Raises:
            OSError, EOFError: The worker cannot be started.
        """
        if launch is not None:
            if launch.sandbox is None:
                program, front = start_program(launch, self._worker_files, self.hidden)
            else:
                # Creating cgroups and directories may block. The starter's own thread is used,
                # since it must outlive the program.
                loop = asyncio.get_running_loop()
                program, front = await loop.run_in_executor(
                    self._thread, start_program, launch, self._worker_files, self.hidden
                )
            self._track(program)
            return program, front
        start_task = asyncio.get_running_loop().run_in_executor(self._thread, self._start, name)
        stopped_checks = 0
        while not start_task.done():
            await asyncio.wait([start_task], timeout=START_CHECK_S)
            stopped_checks = (
                stopped_checks + 1 if not start_task.done() and _fork_server_is_stopped() else 0
            )
            if stopped_checks > 1 or (
                self._start_time is not None
                and time.monotonic() - self._start_time > START_TIMEOUT_S
            ):
                _kill_fork_server()
        return await start_task

    def close(self) -> None:
        self._thread.shutdown()
        self._kill_all()
        atexit.unregister(self._kill_all)

    def _start(self, name: str) -> tuple[WorkerProcess, socket.socket]:
        try:
            return self._start_once(name)
        except (EOFError, ConnectionError):  # The fork server has died: start a new one.
            if not self._forks:
                raise
            _wait_for_end(_fork_server_pid())
            return self._start_once(name)

    def _start_once(self, name: str) -> tuple[WorkerProcess, socket.socket]:
        self._start_time = time.monotonic()
        try:
            if self._forks:
                _ensure_fork_server(self.hidden)
            front, back = socket.socketpair()
            with back:
                try:
                    process = self._start_process(name, back)
                except BaseException:
                    front.close()
                    raise
        finally:
            self._start_time = None
        front.setblocking(False)
        self._track(process)
        return process, front

    def _track(self, process: WorkerProcess | CommandProcess) -> None:
        with self._lock:
            self._alive = {worker for worker in self._alive if worker.alive} | {process}

    def _start_process(self, name: str, back: socket.socket) -> WorkerProcess:
        args = (back, self._worker_files, self.hidden)
        process = self._context.Process(target=run, args=args, name=name)  # type: ignore[attr-defined]  # typeshed: on subclasses
        with _main_hidden(), _clean_start(self.hidden):
            process.start()
        # Otherwise multiprocessing would reap it at the next start, and its exit code would be
        # lost.
        multiprocessing.process._children.discard(process)  # type: ignore[attr-defined]  # private
        return WorkerProcess(process, self._forks)

    def _kill_all(self) -> None:
        for process in self._alive:
            process.kill()


def _choose_short_socket_directory() -> None:
    """Make multiprocessing use a directory in which socket paths are short enough.

    multiprocessing chooses its directory only once, and does not check the length.
    """
    directory = socket_directory()
    if directory != tempfile.gettempdir():
        old_tempdir, tempfile.tempdir = tempfile.tempdir, directory
        try:
            util.get_temp_dir()
        finally:
            tempfile.tempdir = old_tempdir


def _ensure_fork_server(hidden: Collection[str] = ()) -> None:
    """Start the fork server with SIGINT and SIGTERM blocked.

    Terminals and service managers send both to every process of the server. multiprocessing ignores
    SIGINT only after the import of torch. SIGTERM would end the fork server and its workers while
    the front end still has requests to answer. The fork server ends by itself after the front end.
    Its children inherit the mask; a worker resets it once it ignores both signals.
    """
    with _clean_start(hidden):
        # It is started here because it would unblock the signals.
        resource_tracker.ensure_running()
    old_mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT, signal.SIGTERM])
    try:
        with _clean_start(hidden):
            forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, old_mask)


@contextmanager
def _clean_start(hidden: Collection[str]) -> Iterator[None]:
    """Hide variables and the working directory from programs that multiprocessing starts."""
    # The order matters, since the second function calls the first one.
    with hidden_from_children(hidden, os.environ), _without_working_directory():
        yield


@contextmanager
def _without_working_directory() -> Iterator[None]:
    """Keep programs that multiprocessing starts from importing modules of the working directory.

    They are started with `-c`, which puts that directory first on the path.
    """
    original_spawn = util.spawnv_passfds

    def start_clean(path: bytes, args: Sequence[Any], passfds: Sequence[int]) -> int:
        arguments = list(args)
        code_index = arguments.index("-c") + 1
        arguments[code_index] = CLEAN + arguments[code_index]
        return original_spawn(path, arguments, passfds)

    util.spawnv_passfds = start_clean
    try:
        yield
    finally:
        util.spawnv_passfds = original_spawn


@contextmanager
def _main_hidden() -> Iterator[None]:
    """Hide `__main__`, which multiprocessing would import into every worker."""
    with _main_lock:
        main = sys.modules["__main__"]
        sys.modules["__main__"] = types.ModuleType("__main__")
        try:
            yield
        finally:
            sys.modules["__main__"] = main


def _fork_server_is_stopped() -> bool:
    """Tell whether the fork server is stopped by SIGSTOP, so that no worker can start."""
    pid = _fork_server_pid()
    try:
        return pid is not None and psutil.Process(pid).status() == psutil.STATUS_STOPPED
    except (psutil.Error, OSError):
        return False


def _kill_fork_server() -> None:
    """Kill the fork server. A start that waits for it fails, and the next start begins a new one.

    Running workers are not affected.
    """
    if (pid := _fork_server_pid()) is not None:
        logger.error("the fork server (pid %d) does not answer, so it is restarted", pid)
        os.kill(pid, signal.SIGKILL)  # It is an unreaped child, so the pid is still its own.


def _fork_server_pid() -> int | None:
    return getattr(getattr(forkserver, "_forkserver", None), "_forkserver_pid", None)


def _wait_for_end(pid: int | None) -> None:
    """Wait until a dying fork server has ended: a new one can only be started then."""
    fd = None if pid is None else open_pidfd(pid)
    if fd is not None:
        poller = select.poll()
        poller.register(fd, select.POLLIN)
        poller.poll(1000 * REPORT_GRACE_S)
        os.close(fd)


def _exit_code_of_orphan(pid: int) -> int | None:
    """Return the exit code of a worker whose fork server has ended, if this process adopted it.

    The first process of a container adopts orphans, and this process may be it.
    """
    try:
        ended_pid, status = os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        return None
    return os.waitstatus_to_exitcode(status) if ended_pid else None


_main_lock = threading.Lock()
