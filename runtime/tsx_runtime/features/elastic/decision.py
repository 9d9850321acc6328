"""The number of workers that a model should have, as a pure function of its load and its history.

Workers are added quickly and removed slowly:

1. A model is overloaded if all workers are busy, more requests wait than their next batches take,
   and that work takes `MAX_WAITING_WORK_S` or the workers have had no pause. Workers are added once
   this has lasted for two rounds, and for as long as a worker takes to load (at most
   `MAX_OVERLOAD_S`). Enough are added to finish the waiting work within a second, or within the
   loading time, but the number at most doubles. If a full queue has refused a request, workers are
   added at once.
2. A model is quiet if it was not overloaded for `quiet_period` seconds, and fewer workers would
   have been busy for less than `COMFORTABLE_UTILIZATION` of the time. The number shrinks to these.
   If workers are soon added again, the next `quiet_period` doubles. Otherwise a load between two
   numbers would start and stop a worker again and again.
3. A model is unused if no request came for `scale_to_zero` seconds. Then it has no worker.

If the model has a latency target, the measured latency curve decides, not the queue and not how
busy the workers are. Such a model is overloaded if it needs more workers to answer all arriving
requests, including refused ones, within the target. It is also overloaded if it refuses more
requests than the target allows to be late. It is quiet if fewer workers suffice with time to spare.

No worker is added if memory or cores do not suffice, or while a worker loads or fails.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from tsx_runtime.core.scheduling.service_rate import LatencyCapacity

INTERVAL_S = 0.5  # time between two rounds
MAX_WAITING_WORK_S = 0.1  # a busy model with more waiting work gets another worker
MAX_OVERLOAD_S = 5.0  # longest overload before a worker is added, however long it loads
SATURATED_UTILIZATION = 0.9  # fraction of the time that workers of an overloaded model are busy
COMFORTABLE_UTILIZATION = 0.6  # fraction of the time that the remaining workers may be busy
MIN_QUIET_S = 60.0
MAX_QUIET_S = 3600.0
RECENT_S, USUAL_S = 1.0, 20.0  # time constants of the two exponential averages


@dataclass(frozen=True)
class ModelLoad:
    """The load of a model in one round. Times are in seconds, memory is in bytes."""

    now: float
    minimum: int
    maximum: int
    workers: int  # all workers, in any state
    starting: int
    failing: int  # workers that back off or were given up
    working: int  # workers with a batch
    waiting: int  # requests in the queue
    refusals: int = 0  # requests that a full queue refused since the last round
    arrivals: int = 0  # requests since the last round, including refused ones
    latency_capacity: LatencyCapacity | None = None  # only with a latency target
    batch_size: int = 1  # requests that one worker takes at once
    rate: float = 0.0  # requests per second of a busy worker, or 0 if nothing was measured
    load_seconds: float = 0.0
    worker_memory: int = 0
    free_memory: int = 0
    gpu_room: float = math.inf  # number of further workers that fit on the GPUs
    cores: float = math.inf  # cores that workers may use
    cores_per_worker: float = 0.0  # cores that a busy worker uses
    idle_seconds: float = 0.0  # since the last request
    scale_to_zero: float = 0.0  # 0: never


class History(NamedTuple):
    """The observations and decisions of earlier rounds."""

    observed_at: float = -math.inf
    recent_busy: float = 0.0  # average number of busy workers, over RECENT_S
    usual_busy: float = 0.0  # average over USUAL_S
    recent_rate: float = 0.0  # average number of requests per second
    usual_rate: float = 0.0
    overloaded_since: float | None = None
    quiet_since: float | None = None
    quiet_period: float = MIN_QUIET_S
    shrunk_at: float = -math.inf


class Scaling(NamedTuple):
    """The wanted number of workers, and the reason for changing it or for not adding a worker."""

    workers: int
    # queue, refused, slo, quiet or unused; memory or cores if one of these forbids more workers
    reason: str = ""


def decide(load: ModelLoad, previous: History) -> tuple[Scaling, History]:
    """Return the wanted number of workers, and the history for the next round.

    Without a change, the number is the same and the reason is empty.
    """
    history = _with_new_averages(load, previous)
    if not load.workers or load.starting or load.failing:
        return Scaling(load.workers), history._replace(overloaded_since=None, quiet_since=None)
    if load.scale_to_zero and load.idle_seconds >= load.scale_to_zero:
        return Scaling(0, "unused"), History()
    if _is_overloaded(load, history):
        return _decide_overloaded(load, history)
    return _decide_not_overloaded(load, history._replace(overloaded_since=None))


def _with_new_averages(load: ModelLoad, previous: History) -> History:
    if previous.observed_at == -math.inf:
        return previous._replace(
            observed_at=load.now, recent_busy=load.working, usual_busy=load.working
        )
    elapsed = max(load.now - previous.observed_at, 1e-3)
    recent_weight, usual_weight = (
        1 - math.exp(-elapsed / time_constant) for time_constant in (RECENT_S, USUAL_S)
    )
    working, rate = load.working, load.arrivals / elapsed
    return previous._replace(
        observed_at=load.now,
        recent_busy=previous.recent_busy + (working - previous.recent_busy) * recent_weight,
        usual_busy=previous.usual_busy + (working - previous.usual_busy) * usual_weight,
        recent_rate=previous.recent_rate + (rate - previous.recent_rate) * recent_weight,
        usual_rate=previous.usual_rate + (rate - previous.usual_rate) * usual_weight,
    )


def _is_overloaded(load: ModelLoad, history: History) -> bool:
    if _refuses_too_many(load):
        return True
    if load.latency_capacity is not None:
        return (
            load.latency_capacity.min_workers(
                history.recent_rate, SATURATED_UTILIZATION, load.workers + 1
            )
            > load.workers
        )
    if load.working < load.workers or load.waiting < load.batch_size * load.workers:
        return False
    return (
        load.waiting >= MAX_WAITING_WORK_S * load.rate * load.workers
        or history.recent_busy >= SATURATED_UTILIZATION * load.workers
    )


def _refuses_too_many(load: ModelLoad) -> bool:
    """Tell whether more requests were refused than the target allows; without a target, any."""
    return load.refusals > (
        0.0
        if load.latency_capacity is None
        else (1 - load.latency_capacity.target.quantile) * load.arrivals
    )


def _decide_overloaded(load: ModelLoad, history: History) -> tuple[Scaling, History]:
    since = load.now if history.overloaded_since is None else history.overloaded_since
    history = history._replace(overloaded_since=since, quiet_since=None)
    if not _refuses_too_many(load) and load.now - since < max(
        INTERVAL_S / 2, min(load.load_seconds, MAX_OVERLOAD_S)
    ):
        return Scaling(load.workers), history
    if load.latency_capacity is not None:
        target, reason = (
            max(
                load.workers + 1,
                load.latency_capacity.min_workers(
                    history.recent_rate, SATURATED_UTILIZATION, 2 * load.workers
                ),
            ),
            "slo",
        )
    else:
        work = (
            (load.waiting + load.refusals) / (load.rate * max(1.0, load.load_seconds))
            if load.rate
            else 0.0
        )
        target, reason = (
            load.workers + max(1, math.ceil(min(load.workers, work))),
            "refused" if load.refusals else "queue",
        )
    limits = [(load.maximum, ""), (_memory_limit(load), "memory"), (_core_limit(load), "cores")]
    max_workers, limit_reason = min(limits, key=lambda entry: entry[0])
    if max_workers <= load.workers:
        return Scaling(load.workers, limit_reason), history
    if load.now - history.shrunk_at < 2 * history.quiet_period:
        history = history._replace(quiet_period=min(2 * history.quiet_period, MAX_QUIET_S))
    return Scaling(min(target, max_workers), reason), history._replace(overloaded_since=None)


def _decide_not_overloaded(load: ModelLoad, history: History) -> tuple[Scaling, History]:
    busy = (
        math.ceil(history.usual_busy / COMFORTABLE_UTILIZATION)
        if load.latency_capacity is None
        else load.latency_capacity.min_workers(
            history.usual_rate, COMFORTABLE_UTILIZATION, load.workers
        )
    )
    min_workers = max(load.minimum, 1, busy)
    if min_workers >= load.workers:
        return Scaling(load.workers), history._replace(quiet_since=None)
    if history.quiet_since is None:
        return Scaling(load.workers), history._replace(quiet_since=load.now)
    if load.now - history.quiet_since < history.quiet_period:
        return Scaling(load.workers), history
    quiet_period = (
        history.quiet_period
        if load.now - history.shrunk_at < 4 * history.quiet_period
        else max(MIN_QUIET_S, history.quiet_period / 2)
    )
    return Scaling(min_workers, "quiet"), history._replace(
        quiet_since=None, quiet_period=quiet_period, shrunk_at=load.now
    )


def _memory_limit(load: ModelLoad) -> int:
    host_room = (
        max(0, load.free_memory) // load.worker_memory if load.worker_memory else load.maximum
    )
    return int(load.workers + min(host_room, load.gpu_room))


def _core_limit(load: ModelLoad) -> int:
    """Return the number of workers that can run without competing for cores."""
    return (
        max(load.minimum, 1, int(load.cores / load.cores_per_worker))
        if load.cores_per_worker and load.cores < math.inf
        else load.maximum
    )
