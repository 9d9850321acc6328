"""Worker processes, from a fork server that has torch imported already; where fork is not to be had, spawned."""

from __future__ import annotations

import asyncio
import atexit
import multiprocessing
import signal
import socket
import sys
import threading
import types
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing import forkserver, resource_tracker
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess

from tsx_runtime.worker.entry import run

PRELOAD = "tsx_runtime.worker.preload"
PRELOAD_EXPORTED = "tsx_runtime.worker.preload_export"  # a second longer, so only where it is known to be wanted


class WorkerProcess:
    """One process. It ends by itself when its socket is closed."""

    def __init__(self, process: BaseProcess) -> None:
        self._process = process

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def kill(self) -> None:
        self._process.kill()

    async def ended(self) -> int:
        """Wait for the end: the exit code, or minus the signal's number. (255: its fork server was ended first.)"""
        if self._process.exitcode is None:
            await _readable(self._process.sentinel)
            self._process.join()
        code = self._process.exitcode
        assert code is not None
        return code


class ProcessStarter:
    """Starts workers. Holds the one thread in which that may block: the first start waits for the fork server to import torch."""

    def __init__(self, *, preload: bool = True) -> None:
        method = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() and sys.platform == "linux" else "spawn"
        self._context: BaseContext = multiprocessing.get_context(method)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tsx-start")
        self._alive: set[BaseProcess] = set()
        self._preload = preload
        if method == "forkserver":
            self._set_preload(exported=False)
        atexit.register(self._kill_all)  # runs before multiprocessing's own, which would wait for them

    def warm_up(self, *, exported: bool = False) -> None:
        """Start the fork server now, so that it imports torch while the front end starts. `exported`: for `.pt2` models."""
        if self._context.get_start_method() == "forkserver":
            self._set_preload(exported)
            self._thread.submit(_ensure_fork_server)

    def _set_preload(self, exported: bool) -> None:
        modules = [PRELOAD_EXPORTED if exported else PRELOAD] if self._preload else []
        self._context.set_forkserver_preload(modules)

    async def start(self, name: str) -> tuple[WorkerProcess, socket.socket]:
        """A new worker and the front end's end of its socket."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._start, name)

    def close(self) -> None:
        self._thread.shutdown()
        self._kill_all()
        atexit.unregister(self._kill_all)

    def _start(self, name: str) -> tuple[WorkerProcess, socket.socket]:
        if self._context.get_start_method() == "forkserver":
            _ensure_fork_server()
        front, back = socket.socketpair()
        with back:
            process = self._context.Process(target=run, args=(back,), name=name)  # type: ignore[attr-defined]  # typeshed: on subclasses
            with _no_main():
                process.start()
        front.setblocking(False)
        self._alive = {process for process in self._alive if process.is_alive()} | {process}
        return WorkerProcess(process), front

    def _kill_all(self) -> None:
        for process in self._alive:
            if process.is_alive():
                process.kill()


def _ensure_fork_server() -> None:
    """With both stops held back, since a terminal and a service manager send them to every process of the server.

    SIGINT: multiprocessing ignores it only once torch is imported, and until then it is a traceback. SIGTERM would end the fork
    server, and with it the workers, while the front end still has requests to answer; it ends by itself when the front end has.
    What the fork server starts inherits this; a worker lets go of it once it ignores both itself.
    """
    resource_tracker.ensure_running()  # it would let signals through again
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT, signal.SIGTERM])
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _no_main() -> Iterator[None]:
    """Hide `__main__`: multiprocessing would import the program that started us into every worker."""
    with _main_lock:
        main = sys.modules["__main__"]
        sys.modules["__main__"] = types.ModuleType("__main__")
        try:
            yield
        finally:
            sys.modules["__main__"] = main


async def _readable(fd: int) -> None:
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()
    loop.add_reader(fd, _resolve, ready)
    try:
        await ready
    finally:
        loop.remove_reader(fd)


_main_lock = threading.Lock()


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
