"""Memory budgets for the workers of all models: `model_memory` and `model_gpu_memory` of each GPU.

If a model needs memory, idle models are unloaded. The least recently used ones go first.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Iterable,
    Mapping,
    Sequence,
)
from contextlib import asynccontextmanager
from functools import partial
from typing import TypeVar
from weakref import WeakKeyDictionary

from tsx_runtime.core.models.model import ModelVersion
from tsx_runtime.core.workers.memory import MEGA, memory_of, processes_of, size_of_files
from tsx_runtime.core.workers.worker import Worker, WorkerState
from tsx_runtime.errors import LoadOutOfMemory

Versions = Callable[[], Iterable[ModelVersion]]
# Returns the bytes that processes use, by GPU number and process id, where they are known.
GpuProcesses = Callable[[], Awaitable[Mapping[int, Mapping[int, int]]]]

VersionT = TypeVar("VersionT")


def least_recently_used(
    idle: Iterable[tuple[float, int, VersionT]], excess: int
) -> list[VersionT] | None:
    """Choose idle models to unload until `excess` bytes are free, or None if all are too small.

    Args:
        idle: The time of the last use, the bytes, and the model.
        excess: The number of bytes to free.
    """
    selected = []
    for _, memory, version in sorted(idle, key=lambda entry: entry[0]):
        if excess <= 0:
            break
        selected.append(version)
        excess -= memory
    return selected if excess <= 0 else None


class MemoryBudget:
    """The memory budgets of the machine and of each GPU; a loading worker reserves its part."""

    def __init__(
        self,
        limit: int | None,
        versions: Versions,
        all_versions: Versions,
        gpu_limit: int | None = None,
        gpus: int = 0,
        read_gpu_processes: GpuProcesses | None = None,
    ) -> None:
        """Limit the memory of workers; None means no limit.

        Args:
            limit: Bytes of the machine.
            versions: The versions that may be unloaded.
            all_versions: All versions, including those that start or end.
            gpu_limit: Bytes of each GPU.
            gpus: The number of GPUs.
            read_gpu_processes: Returns the memory that processes use on the GPUs.
        """
        self._loading: set[Worker] = set()
        budget = partial(_DeviceBudget, versions, all_versions, self._loading)
        self._host = budget("model_memory", limit, _machine_memory)
        self._gpus = [
            budget("model_gpu_memory", gpu_limit, partial(_gpu_memory, number, read_gpu_processes))
            for number in range(gpus)
        ]

    @asynccontextmanager
    async def reserve(self, version: ModelVersion, worker: Worker) -> AsyncIterator[None]:
        """Reserve memory while a process of the worker loads the model.

        Raises:
            LoadOutOfMemory: No idle model can be unloaded for it.
        """
        budgets = [
            budget
            for budget in (self._host, *self._gpu_budgets(sorted(worker.gpus)))
            if budget.limit is not None
        ]
        try:
            # This cannot deadlock: all workers reserve in the same order of devices, and a loaded
            # worker does not wait for one that has not reserved all its devices.
            for budget in budgets:
                await budget.begin(version, worker, 1 if budget is self._host else len(worker.gpus))
            self._loading.add(worker)
            yield
            for budget in budgets:
                await budget.confirm(version, worker)
        except LoadOutOfMemory:
            for budget in budgets:
                budget.used.pop(worker, None)
            raise
        finally:
            self._loading.discard(worker)
            for budget in budgets:
                budget.end(worker)

    def free(self) -> int | None:
        """Return the machine's free bytes, or None without a limit; idle models occupy memory."""
        return self._host.free()

    def room_for_workers(self, version: ModelVersion) -> float:
        """Return how many more workers of a version fit on its GPUs."""
        budgets = self._gpu_budgets(version.plan.gpus)
        return sum(budget.room_for_workers(version) for budget in budgets) if budgets else math.inf

    async def measure(self) -> None:
        """Measure the workers again, and unload idle models if necessary.

        The memory of a worker may grow while it serves.
        """
        for budget in (self._host, *self._gpus):
            await budget.measure()

    def _gpu_budgets(self, gpus: Iterable[int]) -> list[_DeviceBudget]:
        return [self._gpus[number] for number in gpus if number < len(self._gpus)]


class _DeviceBudget:
    """The memory of one device: measured for loaded workers, and reserved for loading ones.

    There is no `await` between a decision and its reservation, so two workers cannot reserve the
    same memory.
    """

    def __init__(
        self,
        versions: Versions,
        all_versions: Versions,
        loading: Collection[Worker],
        name: str,
        limit: int | None,
        measure: Callable[[Sequence[Worker]], Awaitable[list[int | None]]],
    ) -> None:
        """Limit the memory of one device.

        Args:
            versions: The versions that may be unloaded.
            all_versions: All versions.
            loading: Workers with reserved memory on all their devices.
            name: The name of the setting.
            limit: Bytes of the device, or None.
            measure: Returns the bytes of each worker, or None where they are unknown.
        """
        self.name = name
        self.limit = limit
        self._versions = versions
        self._all_versions = all_versions
        self._loading = loading
        self._measure = measure
        self.used: WeakKeyDictionary[Worker, int] = WeakKeyDictionary()
        # Bytes of one worker of the version, measured once one has loaded.
        self._needs: WeakKeyDictionary[ModelVersion, int] = WeakKeyDictionary()
        # Bytes of loading processes; 0 for one that has loaded and waits for memory.
        self._reserved: dict[Worker, int] = {}
        self._smallest = 0  # bytes of the smallest worker so far; 0 before the first
        self._released = asyncio.Event()  # replaced at each release

    async def begin(self, version: ModelVersion, worker: Worker, device_count: int) -> None:
        """Reserve memory for a process whose model is spread evenly over `device_count` devices."""
        assert self.limit is not None
        if worker.state is not WorkerState.READY:
            self.used.pop(worker, None)  # the memory of the worker's previous process
        size = await asyncio.to_thread(size_of_files, version.archive.directory) // device_count
        # Until one worker is measured, workers load one at a time: the first shows how much memory
        # a process needs.
        while not self._smallest and self._reserved and not worker.stopping.is_set():
            await self._next_release(worker)
        await self._make_room(
            self.limit, version, worker, self._needs.get(version) or max(size, self._smallest)
        )

    async def confirm(self, version: ModelVersion, worker: Worker) -> None:
        """Replace the reservation of a loaded process by its measured memory."""
        assert self.limit is not None
        (used,) = await self._measure([worker])
        self.used[worker] = used = self._reserved[worker] if used is None else used
        if worker.successor is None:  # With one, the measurement covers two processes.
            self._needs[version] = used
        self._smallest = min(self._smallest or used, used)
        self._reserved[worker] = 0
        await self._make_room(self.limit, version, worker, 0)

    def end(self, worker: Worker) -> None:
        if self._reserved.pop(worker, None) is not None:
            released, self._released = self._released, asyncio.Event()
            # The waiting tasks resume later in the event loop. By then this worker is ready, so its
            # model may be unloaded for theirs.
            released.set()

    def free(self) -> int | None:
        return None if self.limit is None else self.limit - self._used_bytes()

    def room_for_workers(self, version: ModelVersion) -> float:
        free, need = self.free(), self._needs.get(version) or self._smallest
        return math.inf if free is None or not need else max(0, free) // need

    async def measure(self) -> None:
        if self.limit is None:
            return
        workers = [
            worker
            for version in self._all_versions()
            for worker in version.workers
            if worker in self.used
        ]
        sizes = await self._measure(workers)
        self.used.update(
            (worker, size) for worker, size in zip(workers, sizes, strict=True) if size is not None
        )
        await self._unload(self._idle(None), self._used_bytes() - self.limit)

    async def _make_room(
        self, limit: int, version: ModelVersion, worker: Worker, need: int
    ) -> None:
        """Reserve memory, and unload idle models for it.

        If too few are idle, wait for loading workers, since their models can be unloaded once they
        are loaded. A loaded worker does not wait for other loaded ones.
        """
        while (excess := self._used_bytes() + need - limit) > 0:
            idle = self._idle(version)
            if least_recently_used(idle, excess) is not None:
                # The reservation precedes the `await`, so that no other worker takes the memory. It
                # is not 0, so that other workers wait for this one instead of failing.
                self._reserved[worker] = need or 1
                await self._unload(idle, excess)
                return
            loading = [
                reserving
                for reserving, size in self._reserved.items()
                if worker not in self._reserved or (size and reserving in self._loading)
            ]
            if not loading or worker.stopping.is_set():
                raise LoadOutOfMemory(self._no_room_text(limit, version, need))
            await self._next_release(worker)
        self._reserved[worker] = need

    async def _next_release(self, worker: Worker) -> None:
        """Wait until another worker has loaded or failed, or this one stops."""
        waiters = [
            asyncio.ensure_future(event.wait()) for event in (self._released, worker.stopping)
        ]
        await asyncio.wait(waiters, return_when=asyncio.FIRST_COMPLETED)
        for waiter in waiters:
            waiter.cancel()

    def _idle(self, version: ModelVersion | None) -> list[tuple[float, int, ModelVersion]]:
        idle = [
            candidate
            for candidate in self._versions()
            if candidate is not version and candidate.workers and candidate.is_idle
        ]
        sizes = [
            (
                idle_version.last_used,
                sum(self.used.get(worker, 0) for worker in idle_version.workers),
                idle_version,
            )
            for idle_version in idle
        ]
        return [entry for entry in sizes if entry[1]]  # A model without bytes is not on the device.

    async def _unload(self, idle: list[tuple[float, int, ModelVersion]], excess: int) -> None:
        selected = least_recently_used(idle, excess) or []
        numbers = (
            f"{self._used_bytes() // MEGA} MB of {self.name} are taken, {max(0, excess) // MEGA} MB"
            " more are needed"
        )
        await asyncio.gather(*(version.adapt(0, self.name, numbers) for version in selected))

    def _used_bytes(self) -> int:
        used = sum(
            self.used.get(worker, 0)
            for version in self._all_versions()
            for worker in version.workers
        )
        return used + sum(self._reserved.values())

    def _no_room_text(self, limit: int, version: ModelVersion, need: int) -> str:
        text = (
            f"There is no room for {version.label}: it needs"
            f" {(need or self._needs.get(version, 0)) // MEGA} MB at least, {self.name}"
        )
        return (
            f"{text} is {limit // MEGA} MB, and no model is idle that could be unloaded. Raise"
            f" {self.name}, or unregister models."
        )


async def _machine_memory(workers: Sequence[Worker]) -> list[int | None]:
    return await asyncio.to_thread(lambda: [memory_of([worker]) for worker in workers])


async def _gpu_memory(
    number: int, read_gpu_processes: GpuProcesses | None, workers: Sequence[Worker]
) -> list[int | None]:
    """Return each worker's memory on a GPU, or None if the driver does not know its processes.

    The driver does not know them if a container gives the processes its own numbers.
    """
    memory_by_pid = (
        {} if read_gpu_processes is None else (await read_gpu_processes()).get(number, {})
    )
    pids = await asyncio.to_thread(
        lambda: [[process.pid for process in processes_of([worker])] for worker in workers]
    )
    return [
        sum(memory_by_pid.get(pid, 0) for pid in worker_pids) or (None if worker_pids else 0)
        for worker_pids in pids
    ]
