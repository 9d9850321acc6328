"""The budget of memory for the workers of all models (`model_memory`): idle models, least recently used first, are unloaded for others."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import TypeVar
from weakref import WeakKeyDictionary

import psutil

from tsx_runtime.core.models.model import ModelVersion
from tsx_runtime.core.workers.worker import Worker, WorkerState
from tsx_runtime.errors import LoadOutOfMemory

MEGA = 1 << 20

VersionT = TypeVar("VersionT")


def least_recently_used(idle: Iterable[tuple[float, int, VersionT]], excess: int) -> list[VersionT] | None:
    """Which of the idle models to unload so that `excess` bytes become free; None where all of them together do not suffice.

    Each is the time of its last use, its bytes, and the model.
    """
    chosen = []
    for _, memory, version in sorted(idle, key=lambda each: each[0]):
        if excess <= 0:
            break
        chosen.append(version)
        excess -= memory
    return chosen if excess <= 0 else None


class MemoryBudget:
    """Counts what workers use once they have loaded, and reserves it before. Decisions are made between two turns of the event loop."""

    def __init__(
        self, bound: int | None, versions: Callable[[], Iterable[ModelVersion]], everyone: Callable[[], Iterable[ModelVersion]]
    ) -> None:
        """`versions` may be unloaded; `everyone` has also those that come and go."""
        self.bound = bound
        self._versions = versions
        self._everyone = everyone
        self._used: WeakKeyDictionary[Worker, int] = WeakKeyDictionary()
        self._needs: WeakKeyDictionary[ModelVersion, int] = WeakKeyDictionary()  # of one worker, once one has loaded
        self._reserved: dict[Worker, int] = {}  # for processes that load; 0 once one has loaded and waits for room
        self._least = 0  # bytes of the smallest worker so far; 0 before one has loaded
        self._released = asyncio.Event()  # replaced each time

    @asynccontextmanager
    async def room(self, version: ModelVersion, worker: Worker) -> AsyncIterator[None]:
        """Open while a process of the worker loads the model. Raises LoadOutOfMemory where no idle model can be unloaded for it."""
        bound = self.bound
        if bound is None:
            yield
            return
        if worker.state is not WorkerState.READY:
            self._used.pop(worker, None)  # of its last process
        size = await asyncio.to_thread(size_of_files, version.archive.directory)
        while not self._least and self._reserved and not worker.stopping.is_set():  # the first one shows what a process takes
            await self._next_release(worker)
        need = self._needs.get(version) or max(size, self._least)
        await self._make_room(bound, version, worker, need)
        try:
            yield
            self._used[worker] = used = await asyncio.to_thread(memory_of, [worker])
            if worker.successor is None:  # else it is that of two processes
                self._needs[version] = used
            self._least = min(self._least or self._used[worker], self._used[worker])
            self._reserved[worker] = 0
            await self._make_room(bound, version, worker, 0)
        except LoadOutOfMemory:
            self._used.pop(worker, None)
            raise
        finally:
            del self._reserved[worker]
            released, self._released = self._released, asyncio.Event()
            released.set()  # those that wait look again once the worker is ready, so that its model may be unloaded

    def free(self) -> int | None:
        """Bytes that are left, those of idle models not counted; None where there is no bound."""
        return None if self.bound is None else self.bound - self._taken()

    async def measure(self) -> None:
        """Workers grow while they work: measure them again, and unload idle models if that is too much."""
        if self.bound is None:
            return
        workers = [worker for version in self._everyone() for worker in version.workers if worker in self._used]
        sizes = await asyncio.to_thread(lambda: [memory_of([worker]) for worker in workers])
        self._used.update(zip(workers, sizes, strict=True))
        await self._unload(self._idle(None), self._taken() - self.bound)

    async def _make_room(self, bound: int, version: ModelVersion, worker: Worker, need: int) -> None:
        """Waits for others that load, whose models may be unloaded then; one that has loaded itself does not wait for others that have."""
        while (excess := self._taken() + need - bound) > 0:
            idle = self._idle(version)
            if least_recently_used(idle, excess) is not None:
                self._reserved[worker] = need or 1  # not 0: it will be done, whatever others do
                await self._unload(idle, excess)
                return
            loading = [other for other, size in self._reserved.items() if size or worker not in self._reserved]
            if not loading or worker.stopping.is_set():
                raise LoadOutOfMemory(self._no_room(bound, version, need))
            await self._next_release(worker)
        self._reserved[worker] = need

    async def _next_release(self, worker: Worker) -> None:
        """Wait until another worker has loaded, or failed to, or this one is not needed any more."""
        waits = [asyncio.ensure_future(event.wait()) for event in (self._released, worker.stopping)]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()

    def _idle(self, version: ModelVersion | None) -> list[tuple[float, int, ModelVersion]]:
        idle = [each for each in self._versions() if each is not version and each.workers and each.is_idle]
        return [(each.last_used, sum(self._used.get(worker, 0) for worker in each.workers), each) for each in idle]

    async def _unload(self, idle: list[tuple[float, int, ModelVersion]], excess: int) -> None:
        chosen = least_recently_used(idle, excess) or []
        numbers = f"{self._taken() // MEGA} MB of model_memory are taken, {max(0, excess) // MEGA} MB more are needed"
        await asyncio.gather(*(version.adapt(0, "model_memory", numbers) for version in chosen))

    def _taken(self) -> int:
        used = sum(self._used.get(worker, 0) for version in self._everyone() for worker in version.workers)
        return used + sum(self._reserved.values())

    def _no_room(self, bound: int, version: ModelVersion, need: int) -> str:
        text = f"There is no room for {version.label}: it needs {(need or self._needs.get(version, 0)) // MEGA} MB at least, model_memory"
        return f"{text} is {bound // MEGA} MB, and no model is idle that could be unloaded. Raise model_memory, or unregister models."


def size_of_files(directory: Path) -> int:
    """Bytes of the files: a loaded model takes at least as much memory."""
    return sum(os.lstat(Path(place, name)).st_size for place, _, names in os.walk(directory) for name in names)


def memory_of(workers: Iterable[Worker]) -> int:
    """The memory of their processes; shared pages count in proportion, where the system tells. For a thread."""
    total = 0
    for worker in workers:
        for running in (worker.instance, worker.successor, *list(worker.retiring)):
            if running is None:
                continue
            with suppress(psutil.Error, OSError):  # it has gone
                for process in running.process.members():
                    full = process.memory_full_info()
                    total += getattr(full, "pss", full.rss)
    return total
