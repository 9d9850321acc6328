"""Budgets of memory for the workers of all models: of the machine (`model_memory`) and of each GPU
(`model_gpu_memory`).

Idle models, least recently used first, are unloaded for others.
"""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Iterable,
    Mapping,
    Sequence,
)
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TypeVar
from weakref import WeakKeyDictionary

import psutil

from tsx_runtime.core.models.model import ModelVersion
from tsx_runtime.core.workers.worker import Worker, WorkerState
from tsx_runtime.errors import LoadOutOfMemory

MEGA = 1 << 20

Versions = Callable[[], Iterable[ModelVersion]]
GpuProcesses = Callable[
    [], Awaitable[Mapping[int, Mapping[int, int]]]
]  # bytes that processes hold, by GPU and pid, as far as it is known

VersionT = TypeVar("VersionT")


def least_recently_used(
    idle: Iterable[tuple[float, int, VersionT]], excess: int
) -> list[VersionT] | None:
    """Which of the idle models to unload so that `excess` bytes become free; None where all of them
    together do not suffice.

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
    """Asked before a process loads a model: its worker needs room in the budget of the machine, and
    in those of its GPUs.
    """

    def __init__(
        self,
        bound: int | None,
        versions: Versions,
        everyone: Versions,
        gpu_bound: int | None = None,
        gpus: int = 0,
        read: GpuProcesses | None = None,
    ) -> None:
        """`versions` may be unloaded; `everyone` has also those that come and go. `gpu_bound` is
        that of each GPU.
        """
        self._loading: set[Worker] = set()
        budget = partial(_DeviceBudget, versions, everyone, self._loading)
        self._host = budget("model_memory", bound, _of_machine)
        self._gpus = [
            budget("model_gpu_memory", gpu_bound, partial(_of_gpu, number, read))
            for number in range(gpus)
        ]

    @asynccontextmanager
    async def room(self, version: ModelVersion, worker: Worker) -> AsyncIterator[None]:
        """Open while a process of the worker loads the model.

        Raises LoadOutOfMemory where no idle model can be unloaded for it.
        """
        budgets = [
            budget
            for budget in (self._host, *self._on(sorted(worker.gpus)))
            if budget.bound is not None
        ]
        try:
            # all in the same order, and none waits for those that are still here once it has loaded
            for budget in budgets:
                await budget.begin(version, worker, 1 if budget is self._host else len(worker.gpus))
            self._loading.add(worker)
            yield
            for budget in budgets:
                await budget.settle(version, worker)
        except LoadOutOfMemory:
            for budget in budgets:
                budget.used.pop(worker, None)
            raise
        finally:
            self._loading.discard(worker)
            for budget in budgets:
                budget.end(worker)

    def free(self) -> int | None:
        """Bytes of the machine that are left, those of idle models not counted; None where there is
        no bound.
        """
        return self._host.free()

    def fitting(self, version: ModelVersion) -> float:
        """How many more workers of it its GPUs have room for."""
        budgets = self._on(version.plan.gpus)
        return sum(budget.fitting(version) for budget in budgets) if budgets else math.inf

    async def measure(self) -> None:
        """Workers grow while they work: measure them again, and unload idle models if that is too
        much.
        """
        for budget in (self._host, *self._gpus):
            await budget.measure()

    def _on(self, gpus: Iterable[int]) -> list[_DeviceBudget]:
        return [self._gpus[number] for number in gpus if number < len(self._gpus)]


class _DeviceBudget:
    """Counts what workers use once they have loaded, and reserves it before.

    Decisions are made between two turns of the event loop.
    """

    def __init__(
        self,
        versions: Versions,
        everyone: Versions,
        loading: Collection[Worker],
        name: str,
        bound: int | None,
        measure: Callable[[Sequence[Worker]], Awaitable[list[int | None]]],
    ) -> None:
        """`loading`: workers that have room on all devices.

        `measure`: the bytes of each of these workers; None where that is not known.
        """
        self.name = name  # of the setting
        self.bound = bound
        self._versions = versions
        self._everyone = everyone
        self._loading = loading
        self._measure = measure
        self.used: WeakKeyDictionary[Worker, int] = WeakKeyDictionary()
        self._needs: WeakKeyDictionary[ModelVersion, int] = (
            WeakKeyDictionary()
        )  # of one worker, once one has loaded
        self._reserved: dict[
            Worker, int
        ] = {}  # for processes that load; 0 once one has loaded and waits for room
        self._least = 0  # bytes of the smallest worker so far; 0 before one has loaded
        self._released = asyncio.Event()  # replaced each time

    async def begin(self, version: ModelVersion, worker: Worker, share: int) -> None:
        """`share`: the devices over which the worker spreads its model."""
        assert self.bound is not None
        if worker.state is not WorkerState.READY:
            self.used.pop(worker, None)  # of its last process
        size = await asyncio.to_thread(size_of_files, version.archive.directory) // share
        while (
            not self._least and self._reserved and not worker.stopping.is_set()
        ):  # the first one shows what a process takes
            await self._next_release(worker)
        await self._make_room(
            self.bound, version, worker, self._needs.get(version) or max(size, self._least)
        )

    async def settle(self, version: ModelVersion, worker: Worker) -> None:
        """A process has loaded."""
        assert self.bound is not None
        (used,) = await self._measure([worker])
        self.used[worker] = used = self._reserved[worker] if used is None else used
        if worker.successor is None:  # else it is that of two processes
            self._needs[version] = used
        self._least = min(self._least or used, used)
        self._reserved[worker] = 0
        await self._make_room(self.bound, version, worker, 0)

    def end(self, worker: Worker) -> None:
        if self._reserved.pop(worker, None) is not None:
            released, self._released = self._released, asyncio.Event()
            # those that wait look again once the worker is ready, so that its model may be unloaded
            released.set()

    def free(self) -> int | None:
        return None if self.bound is None else self.bound - self._taken()

    def fitting(self, version: ModelVersion) -> float:
        free, need = self.free(), self._needs.get(version) or self._least
        return math.inf if free is None or not need else max(0, free) // need

    async def measure(self) -> None:
        if self.bound is None:
            return
        workers = [
            worker
            for version in self._everyone()
            for worker in version.workers
            if worker in self.used
        ]
        sizes = await self._measure(workers)
        self.used.update(
            (worker, size) for worker, size in zip(workers, sizes, strict=True) if size is not None
        )
        await self._unload(self._idle(None), self._taken() - self.bound)

    async def _make_room(
        self, bound: int, version: ModelVersion, worker: Worker, need: int
    ) -> None:
        """Waits for others that load, whose models may be unloaded then; one that has loaded itself
        does not wait for others that have.
        """
        while (excess := self._taken() + need - bound) > 0:
            idle = self._idle(version)
            if least_recently_used(idle, excess) is not None:
                self._reserved[worker] = need or 1  # not 0: it will be done, whatever others do
                await self._unload(idle, excess)
                return
            loading = [
                other
                for other, size in self._reserved.items()
                if worker not in self._reserved or (size and other in self._loading)
            ]
            if not loading or worker.stopping.is_set():
                raise LoadOutOfMemory(self._no_room(bound, version, need))
            await self._next_release(worker)
        self._reserved[worker] = need

    async def _next_release(self, worker: Worker) -> None:
        """Wait until another worker has loaded, or failed to, or this one is not needed any
        more.
        """
        waits = [asyncio.ensure_future(event.wait()) for event in (self._released, worker.stopping)]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()

    def _idle(self, version: ModelVersion | None) -> list[tuple[float, int, ModelVersion]]:
        idle = [
            each
            for each in self._versions()
            if each is not version and each.workers and each.is_idle
        ]
        sizes = [
            (each.last_used, sum(self.used.get(worker, 0) for worker in each.workers), each)
            for each in idle
        ]
        return [each for each in sizes if each[1]]  # others are not on this device

    async def _unload(self, idle: list[tuple[float, int, ModelVersion]], excess: int) -> None:
        chosen = least_recently_used(idle, excess) or []
        numbers = (
            f"{self._taken() // MEGA} MB of {self.name} are taken, {max(0, excess) // MEGA} MB more"
            " are needed"
        )
        await asyncio.gather(*(version.adapt(0, self.name, numbers) for version in chosen))

    def _taken(self) -> int:
        used = sum(
            self.used.get(worker, 0) for version in self._everyone() for worker in version.workers
        )
        return used + sum(self._reserved.values())

    def _no_room(self, bound: int, version: ModelVersion, need: int) -> str:
        text = (
            f"There is no room for {version.label}: it needs"
            f" {(need or self._needs.get(version, 0)) // MEGA} MB at least, {self.name}"
        )
        return (
            f"{text} is {bound // MEGA} MB, and no model is idle that could be unloaded. Raise"
            f" {self.name}, or unregister models."
        )


def size_of_files(directory: Path) -> int:
    """Bytes of the files: a loaded model takes at least as much memory."""
    return sum(
        os.lstat(Path(place, name)).st_size
        for place, _, names in os.walk(directory)
        for name in names
    )


def memory_of(workers: Iterable[Worker]) -> int:
    """The memory of their processes; shared pages count in proportion, where the system tells.

    For a thread.
    """
    total = 0
    for process in _processes_of(workers):
        with suppress(psutil.Error, OSError):  # it has gone
            full = process.memory_full_info()
            total += getattr(full, "pss", full.rss)
    return total


def _processes_of(workers: Iterable[Worker]) -> list[psutil.Process]:
    found: list[psutil.Process] = []
    for worker in workers:
        for running in (worker.instance, worker.successor, *list(worker.retiring)):
            with suppress(psutil.Error, OSError):
                found += [] if running is None else running.process.members()
    return found


async def _of_machine(workers: Sequence[Worker]) -> list[int | None]:
    return await asyncio.to_thread(lambda: [memory_of([worker]) for worker in workers])


async def _of_gpu(
    number: int, read: GpuProcesses | None, workers: Sequence[Worker]
) -> list[int | None]:
    """None where a process lives and the driver does not name it, as in a container whose numbers
    of processes are its own.
    """
    held = {} if read is None else (await read()).get(number, {})
    pids = await asyncio.to_thread(
        lambda: [[process.pid for process in _processes_of([worker])] for worker in workers]
    )
    return [sum(held.get(pid, 0) for pid in each) or (None if each else 0) for each in pids]
