"""The number of workers that a model should have, as a pure function of its load and its history.

Workers are added quickly and removed slowly:

1. A model is pressed if all workers are busy, more requests wait than their next batches take, and
   that work takes `MAX_WAITING_WORK_S` or the workers have had no pause. After two such rounds,
   and the time to load a worker (at most `MAX_PRESSURE_S`), workers are added. They suffice for
   the waiting work within a second, or within the loading time, but at most double the number. A
   request that a full queue refused adds workers at once.
2. A model is quiet if it was not pressed for `quiet_period` seconds, and fewer workers would have
   been busy for less than `COMFORTABLE_SHARE` of the time. The number shrinks to these. If workers
   are soon added again, the next `quiet_period` doubles, so that a load between two numbers does
   not start and stop a worker again and again.
3. A model is unused if no request came for `scale_to_zero` seconds. Then it has no worker.

With a latency target, its curve decides in place of the queue and of the busy share. A model is
pressed if it needs more workers to answer all arriving requests within the target, refused ones
included. It is also pressed if it refuses more of them than the target allows to be late. It is
quiet if fewer workers suffice with time to spare.

No worker is added if memory or cores do not suffice, or while a worker loads or fails.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from tsx_archiver.metadata.slo import LatencyTarget
from tsx_runtime.core.slo.curve import LatencyCurve
from tsx_runtime.core.slo.decision import aim

INTERVAL_S = 0.5  # time between two rounds
MAX_WAITING_WORK_S = 0.1  # waiting work from which a busy model gets another worker
MAX_PRESSURE_S = 5.0  # longest pressure before a worker is added, however long it loads
SATURATED_SHARE = 0.9  # share of the time
COMFORTABLE_SHARE = 0.6  # share of the time
MIN_QUIET_S = 60.0
MAX_QUIET_S = 3600.0
RECENT_S, USUAL_S = 1.0, 20.0  # time over which the number of busy workers is averaged


class LatencyBound(NamedTuple):
    """A latency target with the measured curve of its version."""

    target: LatencyTarget
    seconds: float  # limit within which requests are accepted
    curve: LatencyCurve  # known, not empty

    def workers(self, rate: float, share: float, limit: int) -> int:
        """Return the fewest workers that answer `rate` requests a second in time.

        They are busy for at most `share` of the time. The result is at most `limit`.
        """
        return next(
            (count for count in range(1, limit) if rate <= share * self.capacity(rate, count)[0]),
            limit,
        )

    def capacity(self, rate: float, workers: int) -> tuple[float, int]:
        """Return the requests per second that are answered in time, and the batch size for it."""
        size = aim(self.curve, self.seconds, rate, workers).size
        return workers * size / (self.curve.typical(size) * self.curve.mean), size


@dataclass(frozen=True)
class ModelLoad:
    """The load of a model in one round. Times are in seconds, memory is in bytes."""

    now: float
    minimum: int
    maximum: int
    workers: int  # all workers
    starting: int
    failing: int  # workers that back off or were given up
    working: int  # workers with a batch
    waiting: int  # requests that no worker works on
    refused: int = 0  # requests since the last round, because the queue was full
    arrived: int = 0  # requests since the last round, refused ones included
    bound: LatencyBound | None = None
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
    """The memory of earlier rounds."""

    observed_at: float = -math.inf
    recent: float = 0.0  # average number of busy workers
    usual: float = 0.0
    recent_rate: float = 0.0  # average number of requests per second
    usual_rate: float = 0.0
    pressed_since: float | None = None
    quiet_since: float | None = None
    quiet_period: float = MIN_QUIET_S
    shrunk_at: float = -math.inf


class Scaling(NamedTuple):
    """The number of workers to have, with the reason of a change or of a missing one."""

    workers: int
    # queue, refused, slo, quiet or unused; memory or cores if one of these forbids more workers
    reason: str = ""


def decide(load: ModelLoad, previous: History) -> tuple[Scaling, History]:
    """Return the number of workers to have, and the history for the next round.

    Without a change, the number is the same and the reason is empty.
    """
    history = _averaged(load, previous)
    if not load.workers or load.starting or load.failing:
        return Scaling(load.workers), history._replace(pressed_since=None, quiet_since=None)
    if load.scale_to_zero and load.idle_seconds >= load.scale_to_zero:
        return Scaling(0, "unused"), History()
    if _is_pressed(load, history):
        return _decide_pressed(load, history)
    return _decide_unpressed(load, history._replace(pressed_since=None))


def _averaged(load: ModelLoad, previous: History) -> History:
    if previous.observed_at == -math.inf:
        return previous._replace(observed_at=load.now, recent=load.working, usual=load.working)
    elapsed = max(load.now - previous.observed_at, 1e-3)
    recent, usual = (1 - math.exp(-elapsed / span) for span in (RECENT_S, USUAL_S))
    working, rate = load.working, load.arrived / elapsed
    return previous._replace(
        observed_at=load.now,
        recent=previous.recent + (working - previous.recent) * recent,
        usual=previous.usual + (working - previous.usual) * usual,
        recent_rate=previous.recent_rate + (rate - previous.recent_rate) * recent,
        usual_rate=previous.usual_rate + (rate - previous.usual_rate) * usual,
    )


def _is_pressed(load: ModelLoad, history: History) -> bool:
    if _refuses_too_many(load):
        return True
    if load.bound is not None:
        return (
            load.bound.workers(history.recent_rate, SATURATED_SHARE, load.workers + 1)
            > load.workers
        )
    if load.working < load.workers or load.waiting < load.batch_size * load.workers:
        return False
    return (
        load.waiting >= MAX_WAITING_WORK_S * load.rate * load.workers
        or history.recent >= SATURATED_SHARE * load.workers
    )


def _refuses_too_many(load: ModelLoad) -> bool:
    """Tell whether more requests were refused than the target, if any, allows to be late."""
    return load.refused > (
        0.0 if load.bound is None else (1 - load.bound.target.quantile) * load.arrived
    )


def _decide_pressed(load: ModelLoad, history: History) -> tuple[Scaling, History]:
    since = load.now if history.pressed_since is None else history.pressed_since
    history = history._replace(pressed_since=since, quiet_since=None)
    if not _refuses_too_many(load) and load.now - since < max(
        INTERVAL_S / 2, min(load.load_seconds, MAX_PRESSURE_S)
    ):
        return Scaling(load.workers), history
    if load.bound is not None:
        target, reason = (
            max(
                load.workers + 1,
                load.bound.workers(history.recent_rate, SATURATED_SHARE, 2 * load.workers),
            ),
            "slo",
        )
    else:
        work = (
            (load.waiting + load.refused) / (load.rate * max(1.0, load.load_seconds))
            if load.rate
            else 0.0
        )
        target, reason = (
            load.workers + max(1, math.ceil(min(load.workers, work))),
            "refused" if load.refused else "queue",
        )
    limits = [(load.maximum, ""), (_memory_limit(load), "memory"), (_core_limit(load), "cores")]
    max_workers, limit_reason = min(limits, key=lambda entry: entry[0])
    if max_workers <= load.workers:
        return Scaling(load.workers, limit_reason), history
    if load.now - history.shrunk_at < 2 * history.quiet_period:
        history = history._replace(quiet_period=min(2 * history.quiet_period, MAX_QUIET_S))
    return Scaling(min(target, max_workers), reason), history._replace(pressed_since=None)


def _decide_unpressed(load: ModelLoad, history: History) -> tuple[Scaling, History]:
    busy = (
        math.ceil(history.usual / COMFORTABLE_SHARE)
        if load.bound is None
        else load.bound.workers(history.usual_rate, COMFORTABLE_SHARE, load.workers)
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
    """Return the number of workers that the cores can run without waiting for each other."""
    return (
        max(load.minimum, 1, int(load.cores / load.cores_per_worker))
        if load.cores_per_worker and load.cores < math.inf
        else load.maximum
    )
