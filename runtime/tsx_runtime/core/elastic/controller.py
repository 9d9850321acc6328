"""The periodic task that adapts the number of workers of all adaptive models of a server."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass, field
from typing import Any

from tsx_runtime.core.elastic.decision import History, LatencyBound, ModelLoad, decide
from tsx_runtime.core.elastic.memory import MEGA, MemoryBudget
from tsx_runtime.core.models.model import ModelVersion
from tsx_runtime.core.models.plan import MAX_WORKERS
from tsx_runtime.core.workers.instance import ResourceUsage, WorkerInstance
from tsx_runtime.core.workers.worker import Worker, WorkerState
from tsx_runtime.shared.log_format import rounded
from tsx_runtime.shared.memory import free_memory

ROUNDS_PER_MEASUREMENT = 10  # rounds between two measurements of the memory budget
MIN_BUSY_S = 1.0  # work that is observed before the cores of a worker are computed


@dataclass
class _WatchedVersion:
    """The observations of one version."""

    history: History = field(default_factory=History)
    refusals: int = 0
    arrived: int = 0
    processes: frozenset[WorkerInstance | None] = frozenset()  # processes of the two sums below
    cpu_seconds: float = 0.0
    busy_seconds: float = 0.0
    cores_per_worker: float = 1.0
    last_limit: str = ""  # the last reported reason for no further worker


class ElasticController:
    def __init__(
        self,
        versions: Callable[[], Iterable[ModelVersion]],
        budget: MemoryBudget,
        cores: int,
        start_task: Callable[[Coroutine[Any, Any, None]], None],
    ) -> None:
        """Adapt `versions` in later rounds; `start_task` runs a scaling in the background."""
        self._versions = versions
        self._budget = budget
        self._cores = cores
        self._start_task = start_task
        self.clock = time.monotonic
        self._watched: dict[ModelVersion, _WatchedVersion] = {}
        self._rounds = itertools.count(1)

    async def adjust(self) -> None:
        """Observe all adaptive versions, and start the scalings that they need."""
        if next(self._rounds) % ROUNDS_PER_MEASUREMENT == 0:
            await self._budget.measure()
        adaptive = [version for version in self._versions() if version.adapts and version.workers]
        if not adaptive:
            self._watched.clear()
            return
        serving = [
            worker
            for version in adaptive
            for worker in version.workers
            if worker.state is WorkerState.READY
        ]
        usage, memory = await asyncio.to_thread(
            lambda: ({worker: worker.usage() for worker in serving}, free_memory())
        )
        budgeted = self._budget.free()
        free = memory if budgeted is None else min(memory, budgeted)
        # Some versions may have been removed meanwhile.
        adaptive = [version for version in self._versions() if version in adaptive]
        self._watched = {
            version: self._watched.get(version) or _WatchedVersion() for version in adaptive
        }
        for version, watched in self._watched.items():
            self._apply(
                version,
                watched,
                _observe(
                    version,
                    watched,
                    self.clock(),
                    usage,
                    free,
                    self._budget.room_for_workers(version),
                    self._cores,
                ),
            )

    def _apply(self, version: ModelVersion, watched: _WatchedVersion, load: ModelLoad) -> None:
        decision, watched.history = decide(load, watched.history)
        if decision.workers == len(version.workers):
            if decision.reason and decision.reason != watched.last_limit:
                version.hold(decision.reason, _numbers(load, watched.history))
            watched.last_limit = decision.reason or watched.last_limit
            return
        if decision.workers < len(version.workers) and not version.can_shrink:
            return
        watched.last_limit = ""
        self._start_task(
            version.adapt(decision.workers, decision.reason, _numbers(load, watched.history))
        )


def _observe(
    version: ModelVersion,
    watched: _WatchedVersion,
    now: float,
    usage: dict[Worker, ResourceUsage | None],
    free: int,
    gpu_room: float,
    cores: int,
) -> ModelLoad:
    waiting, working, rate = version.pressure()
    states = [worker.state for worker in version.workers]
    refusals = version.stats.refusals["QueueFull"] + (
        version.stats.refusals["NoWorker"] if version.plan.strategy.tickets else 0
    )
    refused, watched.refusals = (
        max(0, refusals - watched.refusals) if watched.history.observed_at > 0 else 0,
        refusals,
    )
    count, report = version.stats.requests + refusals, version.slo
    arrived, watched.arrived = (
        max(0, count - watched.arrived) if watched.history.observed_at > 0 else 0,
        count,
    )
    bound = None
    if report is not None and report.curve is not None and report.curve.known:
        bound = LatencyBound(report.target, report.seconds, report.curve)
    usages = {
        worker: worker_usage
        for worker, worker_usage in usage.items()
        if worker_usage is not None and worker in version.workers
    }
    _measure_cores(version, watched, usages)
    return ModelLoad(
        now=now,
        minimum=version.min_workers,
        maximum=min(version.max_workers, MAX_WORKERS),
        workers=len(states),
        starting=states.count(WorkerState.LOADING),
        failing=states.count(WorkerState.BACKING_OFF) + states.count(WorkerState.FAILED),
        working=working,
        waiting=waiting,
        refused=refused,
        arrived=arrived,
        bound=bound,
        batch_size=version.batch_places or 1,
        rate=rate,
        load_seconds=min(
            (worker.instance.model_seconds for worker in version.workers if worker.instance),
            default=0.0,
        ),
        worker_memory=max((process.memory for process in usages.values()), default=0),
        free_memory=free,
        gpu_room=gpu_room,
        cores=cores,
        cores_per_worker=0.0 if version.plan.gpus else watched.cores_per_worker,
        unused=max(0.0, now - version.last_used),
        scale_to_zero=version.plan.scale_to_zero,
    )


def _measure_cores(
    version: ModelVersion, watched: _WatchedVersion, used: dict[Worker, ResourceUsage]
) -> None:
    """Learn how many cores a busy worker uses, at most one.

    More workers get fewer threads each. A worker that waits for other services uses less.
    """
    cpu, busy = sum(process.cpu_seconds for process in used.values()), version.stats.busy_seconds
    # A restarted process has used nothing yet.
    processes = frozenset(worker.instance for worker in used)
    if watched.processes != processes:
        watched.processes, watched.cpu_seconds, watched.busy_seconds = processes, cpu, busy
    elif busy - watched.busy_seconds > MIN_BUSY_S:
        watched.cores_per_worker = min(
            1.0, (cpu - watched.cpu_seconds) / (busy - watched.busy_seconds)
        )


def _numbers(load: ModelLoad, history: History) -> str:
    bound = ""
    if load.bound is not None:
        rate, size = load.bound.capacity(history.recent_rate, load.workers)
        slo = load.bound.target.text
        bound = (
            f"{rounded(history.recent_rate)} requests/s arrive, of which these answer"
            f" {rounded(rate)} within {slo}, in batches of {size}"
        )
    parts = [
        bound,
        f"{load.waiting} requests wait",
        f"{load.refused} refused" if load.refused else "",
        f"{load.working} of {load.workers} workers are at work",
        f"{rounded(load.rate)} requests/s each",
        (
            f"a worker loads in {load.load_seconds:.2g} s and uses {load.worker_memory // MEGA} MB"
            f" of {load.free_memory // MEGA} MB free"
        ),
        (
            f"it uses {load.cores_per_worker:.2g} of {load.cores:g} cores at work"
            if load.cores_per_worker
            else ""
        ),
        f"no request for {load.unused:.0f} s" if load.unused >= 1 else "",
    ]
    return ", ".join(filter(None, parts))
