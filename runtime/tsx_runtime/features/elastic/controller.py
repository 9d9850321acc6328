"""The periodic task that is_adaptive the number of workers of all adaptive models of a server."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass, field
from typing import Any

from tsx_runtime.core.models.model import ModelVersion
from tsx_runtime.core.models.plan import MAX_WORKERS
from tsx_runtime.core.workers.instance import ResourceUsage, WorkerInstance
from tsx_runtime.core.workers.memory import MEGA
from tsx_runtime.core.workers.worker import Worker, WorkerState
from tsx_runtime.features.elastic.decision import History, ModelLoad, decide
from tsx_runtime.features.elastic.memory import MemoryBudget
from tsx_runtime.shared.log_format import rounded
from tsx_runtime.shared.memory import free_memory

ROUNDS_PER_MEASUREMENT = 10  # rounds between two measurements of the memory budget
MIN_BUSY_S = 1.0  # busy time that is observed before the cores per worker are estimated


@dataclass
class _WatchedVersion:
    """The observations of one version."""

    history: History = field(default_factory=History)
    refusals: int = 0  # total at the last round
    requests: int = 0  # total at the last round
    # The processes that the next two sums cover.
    processes: frozenset[WorkerInstance | None] = frozenset()
    cpu_seconds: float = 0.0
    busy_seconds: float = 0.0
    cores_per_worker: float = 1.0
    last_limit: str = ""  # the reason last reported for not adding a worker


class ElasticController:
    def __init__(
        self,
        versions: Callable[[], Iterable[ModelVersion]],
        budget: MemoryBudget,
        cores: int,
        start_task: Callable[[Coroutine[Any, Any, None]], None],
    ) -> None:
        """Prepare to adapt the workers of `versions`; each `adjust` is one round of decisions.

        `start_task` runs the change of a number of workers in the background.
        """
        self._versions = versions
        self._budget = budget
        self._cores = cores
        self._start_task = start_task
        self.clock = time.monotonic
        self._watched: dict[ModelVersion, _WatchedVersion] = {}
        self._rounds = itertools.count(1)

    async def adjust(self) -> None:
        """Observe all adaptive versions, and start to change the numbers of workers."""
        if next(self._rounds) % ROUNDS_PER_MEASUREMENT == 0:
            await self._budget.measure()
        adaptive_versions = [
            version for version in self._versions() if version.is_adaptive and version.workers
        ]
        if not adaptive_versions:
            self._watched.clear()
            return
        ready_workers = [
            worker
            for version in adaptive_versions
            for worker in version.workers
            if worker.state is WorkerState.READY
        ]
        usage_by_worker, host_bytes = await asyncio.to_thread(
            lambda: ({worker: worker.usage() for worker in ready_workers}, free_memory())
        )
        budget_bytes = self._budget.free()
        free_bytes = host_bytes if budget_bytes is None else min(host_bytes, budget_bytes)
        # Some versions may have been removed while the usage was measured.
        adaptive_versions = [
            version for version in self._versions() if version in adaptive_versions
        ]
        self._watched = {
            version: self._watched.get(version) or _WatchedVersion()
            for version in adaptive_versions
        }
        for version, watched in self._watched.items():
            self._apply(
                version,
                watched,
                _observe(
                    version,
                    watched,
                    self.clock(),
                    usage_by_worker,
                    free_bytes,
                    self._budget.room_for_workers(version),
                    self._cores,
                ),
            )

    def _apply(self, version: ModelVersion, watched: _WatchedVersion, load: ModelLoad) -> None:
        decision, watched.history = decide(load, watched.history)
        if decision.workers == len(version.workers):
            if decision.reason and decision.reason != watched.last_limit:
                version.report_no_more_workers(decision.reason, _numbers(load, watched.history))
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
    usage_by_worker: dict[Worker, ResourceUsage | None],
    free_bytes: int,
    gpu_room: float,
    cores: int,
) -> ModelLoad:
    waiting, working, rate = version.current_load()
    states = [worker.state for worker in version.workers]
    refusals = version.stats.refusals["QueueFull"] + (
        version.stats.refusals["NoWorker"] if version.plan.strategy.uses_job_tickets else 0
    )
    new_refusals, watched.refusals = (
        max(0, refusals - watched.refusals) if watched.history.observed_at > 0 else 0,
        refusals,
    )
    requests = version.stats.requests + refusals
    new_requests, watched.requests = (
        max(0, requests - watched.requests) if watched.history.observed_at > 0 else 0,
        requests,
    )
    usages = {
        worker: usage
        for worker, usage in usage_by_worker.items()
        if usage is not None and worker in version.workers
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
        refusals=new_refusals,
        arrivals=new_requests,
        latency_capacity=version.dispatcher.latency_capacity,
        batch_size=version.batch_places or 1,
        rate=rate,
        load_seconds=min(
            (worker.instance.model_seconds for worker in version.workers if worker.instance),
            default=0.0,
        ),
        worker_memory=max((usage.memory for usage in usages.values()), default=0),
        free_memory=free_bytes,
        gpu_room=gpu_room,
        cores=cores,
        cores_per_worker=0.0 if version.plan.gpus else watched.cores_per_worker,
        idle_seconds=max(0.0, now - version.last_used),
        scale_to_zero=version.plan.scale_to_zero,
    )


def _measure_cores(
    version: ModelVersion, watched: _WatchedVersion, usages: dict[Worker, ResourceUsage]
) -> None:
    """Measure how many cores a busy worker uses, at most one.

    The workers share the cores, so each gets fewer threads as workers are added. One core is
    therefore enough for each. A worker that waits for other services uses less than one.
    """
    cpu_seconds = sum(usage.cpu_seconds for usage in usages.values())
    busy_seconds = version.stats.busy_seconds
    # A new process starts at zero CPU seconds, so both sums start again.
    processes = frozenset(worker.instance for worker in usages)
    if watched.processes != processes:
        watched.processes, watched.cpu_seconds, watched.busy_seconds = (
            processes,
            cpu_seconds,
            busy_seconds,
        )
    elif busy_seconds - watched.busy_seconds > MIN_BUSY_S:
        watched.cores_per_worker = min(
            1.0, (cpu_seconds - watched.cpu_seconds) / (busy_seconds - watched.busy_seconds)
        )


def _numbers(load: ModelLoad, history: History) -> str:
    capacity_text = ""
    if load.latency_capacity is not None:
        rate, size = load.latency_capacity.throughput(history.recent_rate, load.workers)
        slo = load.latency_capacity.target.text
        capacity_text = (
            f"{rounded(history.recent_rate)} requests/s arrive, of which these answer"
            f" {rounded(rate)} within {slo}, in batches of {size}"
        )
    parts = [
        capacity_text,
        f"{load.waiting} requests wait",
        f"{load.refusals} refused" if load.refusals else "",
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
        f"no request for {load.idle_seconds:.0f} s" if load.idle_seconds >= 1 else "",
    ]
    return ", ".join(filter(None, parts))
