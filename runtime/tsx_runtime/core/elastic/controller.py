"""Looks at the models whose number of workers may change, decides, and scales them: one periodic
task per server.
"""

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

MEASURE_EVERY = 10  # looks between two measurements of the budget
BUSY_ENOUGH = 1.0  # seconds of work from which the cores that a worker uses are computed


@dataclass
class _Watched:
    """What is remembered of one version."""

    history: History = field(default_factory=History)
    refusals: int = 0
    arrived: int = 0
    processes: frozenset[WorkerInstance | None] = frozenset()  # since when the two sums are counted
    cpu_seconds: float = 0.0
    busy_seconds: float = 0.0
    cores_of_worker: float = 1.0
    held: str = ""  # what kept workers away, as told last


class ElasticController:
    def __init__(
        self,
        versions: Callable[[], Iterable[ModelVersion]],
        budget: MemoryBudget,
        cores: int,
        begin: Callable[[Coroutine[Any, Any, None]], None],
    ) -> None:
        """`versions` are those that requests find. `begin` runs a scaling beside this."""
        self._versions = versions
        self._budget = budget
        self._cores = cores
        self._begin = begin
        self.clock = time.monotonic
        self._watched: dict[ModelVersion, _Watched] = {}
        self._looks = itertools.count(1)

    async def look(self) -> None:
        if next(self._looks) % MEASURE_EVERY == 0:
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
        left = self._budget.free()
        free = memory if left is None else min(memory, left)
        adaptive = [
            version for version in self._versions() if version in adaptive
        ]  # some may have gone meanwhile
        self._watched = {version: self._watched.get(version) or _Watched() for version in adaptive}
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
                    self._budget.fitting(version),
                    self._cores,
                ),
            )

    def _apply(self, version: ModelVersion, watched: _Watched, seen: ModelLoad) -> None:
        decision, watched.history = decide(seen, watched.history)
        if decision.workers == len(version.workers):
            if decision.reason and decision.reason != watched.held:
                version.hold(decision.reason, _numbers(seen, watched.history))
            watched.held = decision.reason or watched.held
            return
        if decision.workers < len(version.workers) and not version.can_shrink:
            return
        watched.held = ""
        self._begin(
            version.adapt(decision.workers, decision.reason, _numbers(seen, watched.history))
        )


def _observe(
    version: ModelVersion,
    watched: _Watched,
    now: float,
    usage: dict[Worker, ResourceUsage | None],
    free: int,
    fitting: float,
    cores: int,
) -> ModelLoad:
    waiting, working, rate = version.pressure()
    states = [worker.state for worker in version.workers]
    refusals = version.stats.refusals["QueueFull"] + (
        version.stats.refusals["NoWorker"] if version.plan.strategy.tickets else 0
    )
    refused, watched.refusals = (
        max(0, refusals - watched.refusals) if watched.history.looked > 0 else 0,
        refusals,
    )
    count, report = version.stats.requests + refusals, version.slo
    arrived, watched.arrived = (
        max(0, count - watched.arrived) if watched.history.looked > 0 else 0,
        count,
    )
    bound = None
    if report is not None and report.curve is not None and report.curve.known:
        bound = LatencyBound(report.target, report.seconds, report.curve)
    used = {
        worker: each
        for worker, each in usage.items()
        if each is not None and worker in version.workers
    }
    _learn_cores(version, watched, used)
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
        places=version.batch_places or 1,
        rate=rate,
        load_seconds=min(
            (worker.instance.model_seconds for worker in version.workers if worker.instance),
            default=0.0,
        ),
        worker_memory=max((each.memory for each in used.values()), default=0),
        free_memory=free,
        fitting=fitting,
        cores=cores,
        cores_of_worker=0.0 if version.plan.gpus else watched.cores_of_worker,
        unused=max(0.0, now - version.last_used),
        scale_to_zero=version.plan.scale_to_zero,
    )


def _learn_cores(
    version: ModelVersion, watched: _Watched, used: dict[Worker, ResourceUsage]
) -> None:
    """Of a worker at work: at most one, as more workers get fewer threads each.

    Where it waits for others, it uses less.
    """
    cpu, busy = sum(each.cpu_seconds for each in used.values()), version.stats.busy_seconds
    processes = frozenset(
        worker.instance for worker in used
    )  # one that was restarted has used nothing yet
    if watched.processes != processes:
        watched.processes, watched.cpu_seconds, watched.busy_seconds = processes, cpu, busy
    elif busy - watched.busy_seconds > BUSY_ENOUGH:
        watched.cores_of_worker = min(
            1.0, (cpu - watched.cpu_seconds) / (busy - watched.busy_seconds)
        )


def _numbers(seen: ModelLoad, then: History) -> str:
    bound = ""
    if seen.bound is not None:
        rate, size = seen.bound.capacity(then.recent_rate, seen.workers)
        slo = seen.bound.target.text
        bound = (
            f"{rounded(then.recent_rate)} requests/s arrive, of which these answer {rounded(rate)}"
            f" within {slo}, in batches of {size}"
        )
    parts = [
        bound,
        f"{seen.waiting} requests wait",
        f"{seen.refused} refused" if seen.refused else "",
        f"{seen.working} of {seen.workers} workers are at work",
        f"{rounded(seen.rate)} requests/s each",
        (
            f"a worker loads in {seen.load_seconds:.2g} s and uses {seen.worker_memory // MEGA} MB"
            f" of {seen.free_memory // MEGA} MB free"
        ),
        (
            f"it uses {seen.cores_of_worker:.2g} of {seen.cores:g} cores at work"
            if seen.cores_of_worker
            else ""
        ),
        f"no request for {seen.unused:.0f} s" if seen.unused >= 1 else "",
    ]
    return ", ".join(filter(None, parts))
