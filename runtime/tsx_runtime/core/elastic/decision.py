"""How many workers a model should have now: a pure function of what is seen of it and of what was
seen before. No clock, no I/O.

Up is quick, down is slow:

1. Pressed: all workers are at work, more requests wait than these take with their next batches, and
   either it takes `PATIENCE` until they are done or the workers have had no pause. Once that has
   lasted at two looks, and for as long as a worker takes to load (`LONGEST_PATIENCE` at most),
   workers are added: as many as do what waits in a second, or in the time to load one; at most as
   many as there are. A request that was refused because the queue is full adds workers at once.
2. Quiet: nothing was pressed for `calm` seconds, and fewer workers would have been at work for less
   than `COMFORTABLE` of the time. Then that many are left. If workers are added again soon after,
   the next `calm` is twice as long: a load that just needs one more worker does not start and stop
   it again and again.
3. Unused: no request for `scale_to_zero` seconds. Then none is left.

With a latency target, its curve decides instead of the queue and of how busy the workers are:
pressed is a model that needs more workers to answer within the target all requests that arrive,
refused ones included, or that refuses more of them than the target allows to be late; quiet is one
for which fewer suffice with time to spare.

Nothing is added where memory or cores do not suffice, or while a worker loads or fails.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from tsx_archiver.metadata.slo import LatencyTarget
from tsx_runtime.core.slo.curve import LatencyCurve
from tsx_runtime.core.slo.decision import aim

LOOK = 0.5  # seconds between two looks
PATIENCE = 0.1  # seconds of work that may wait before a busy model gets another worker
LONGEST_PATIENCE = 5.0  # seconds that pressure must last where a worker loads for longer
SATURATED = 0.9  # share of the time
COMFORTABLE = 0.6  # share of the time
CALM = 60.0  # seconds
MOST_CALM = 3600.0  # seconds
RECENT, USUAL = 1.0, 20.0  # seconds over which the share of workers at work is averaged


class LatencyBound(NamedTuple):
    """A latency target, with what its version has learned."""

    target: LatencyTarget
    seconds: float  # within which requests are accepted
    curve: LatencyCurve  # that is known

    def workers(self, rate: float, share: float, most: int) -> int:
        """The fewest, `most` at most, that answer `rate` requests a second in time and are at work
        for `share` of the time.
        """
        return next(
            (count for count in range(1, most) if rate <= share * self.capacity(rate, count)[0]),
            most,
        )

    def capacity(self, rate: float, workers: int) -> tuple[float, int]:
        """Requests per second that these answer in time, and the size of the batches that they aim
        at.
        """
        size = aim(self.curve, self.seconds, rate, workers).size
        return workers * size / (self.curve.typical(size) * self.curve.mean), size


@dataclass(frozen=True)
class ModelLoad:
    """What is seen of a model at one look. Times are in seconds, memory is in bytes."""

    now: float
    minimum: int
    maximum: int
    workers: int  # all, of which
    starting: int
    failing: int  # that back off or were given up
    working: int  # that have a batch
    waiting: int  # requests that no worker works on
    refused: int = 0  # since the last look, because the queue was full
    arrived: int = 0  # since the last look, refused ones included
    bound: LatencyBound | None = None
    places: int = 1  # requests that one worker takes at once
    rate: float = 0.0  # requests per second of one worker at work; 0 where nothing was measured
    load_seconds: float = 0.0
    worker_memory: int = 0
    free_memory: int = 0
    fitting: float = math.inf  # more workers that the GPUs have room for
    cores: float = math.inf  # that workers may use
    cores_of_worker: float = 0.0  # that one at work uses
    unused: float = 0.0  # since its last request
    scale_to_zero: float = 0.0  # 0: never


class History(NamedTuple):
    """What is kept of earlier looks."""

    looked: float = -math.inf
    recent: float = 0.0  # workers at work, on average
    usual: float = 0.0
    recent_rate: float = 0.0  # requests that arrive per second, on average
    usual_rate: float = 0.0
    pressed_since: float | None = None
    quiet_since: float | None = None
    calm: float = CALM
    shrunk: float = -math.inf  # when


class Scaling(NamedTuple):
    workers: int
    # queue, refused, slo, quiet or unused; memory or cores where one of these kept workers away
    reason: str = ""


def decide(seen: ModelLoad, before: History) -> tuple[Scaling, History]:
    """How many workers there should be, and what to remember.

    The same number, without a reason, where all is well.
    """
    then = _averaged(seen, before)
    if not seen.workers or seen.starting or seen.failing:
        return Scaling(seen.workers), then._replace(pressed_since=None, quiet_since=None)
    if seen.scale_to_zero and seen.unused >= seen.scale_to_zero:
        return Scaling(0, "unused"), History()
    if _is_pressed(seen, then):
        return _when_pressed(seen, then)
    return _when_not(seen, then._replace(pressed_since=None))


def _averaged(seen: ModelLoad, before: History) -> History:
    if before.looked == -math.inf:
        return before._replace(looked=seen.now, recent=seen.working, usual=seen.working)
    passed = max(seen.now - before.looked, 1e-3)
    recent, usual = (1 - math.exp(-passed / span) for span in (RECENT, USUAL))
    working, rate = seen.working, seen.arrived / passed
    return before._replace(
        looked=seen.now,
        recent=before.recent + (working - before.recent) * recent,
        usual=before.usual + (working - before.usual) * usual,
        recent_rate=before.recent_rate + (rate - before.recent_rate) * recent,
        usual_rate=before.usual_rate + (rate - before.usual_rate) * usual,
    )


def _is_pressed(seen: ModelLoad, then: History) -> bool:
    if _refuses(seen):
        return True
    if seen.bound is not None:
        return seen.bound.workers(then.recent_rate, SATURATED, seen.workers + 1) > seen.workers
    if seen.working < seen.workers or seen.waiting < seen.places * seen.workers:
        return False
    return (
        seen.waiting >= PATIENCE * seen.rate * seen.workers
        or then.recent >= SATURATED * seen.workers
    )


def _refuses(seen: ModelLoad) -> bool:
    """More than the target, where there is one, allows to be late."""
    return seen.refused > (
        0.0 if seen.bound is None else (1 - seen.bound.target.quantile) * seen.arrived
    )


def _when_pressed(seen: ModelLoad, then: History) -> tuple[Scaling, History]:
    since = seen.now if then.pressed_since is None else then.pressed_since
    then = then._replace(pressed_since=since, quiet_since=None)
    if not _refuses(seen) and seen.now - since < max(
        LOOK / 2, min(seen.load_seconds, LONGEST_PATIENCE)
    ):
        return Scaling(seen.workers), then
    if seen.bound is not None:
        wanted, reason = (
            max(
                seen.workers + 1, seen.bound.workers(then.recent_rate, SATURATED, 2 * seen.workers)
            ),
            "slo",
        )
    else:
        work = (
            (seen.waiting + seen.refused) / (seen.rate * max(1.0, seen.load_seconds))
            if seen.rate
            else 0.0
        )
        wanted, reason = (
            seen.workers + max(1, math.ceil(min(seen.workers, work))),
            "refused" if seen.refused else "queue",
        )
    limits = [(seen.maximum, ""), (_fitting(seen), "memory"), (_cores(seen), "cores")]
    most, limit = min(limits, key=lambda each: each[0])
    if most <= seen.workers:
        return Scaling(seen.workers, limit), then
    if seen.now - then.shrunk < 2 * then.calm:
        then = then._replace(calm=min(2 * then.calm, MOST_CALM))
    return Scaling(min(wanted, most), reason), then._replace(pressed_since=None)


def _when_not(seen: ModelLoad, then: History) -> tuple[Scaling, History]:
    busy = (
        math.ceil(then.usual / COMFORTABLE)
        if seen.bound is None
        else seen.bound.workers(then.usual_rate, COMFORTABLE, seen.workers)
    )
    least = max(seen.minimum, 1, busy)
    if least >= seen.workers:
        return Scaling(seen.workers), then._replace(quiet_since=None)
    if then.quiet_since is None:
        return Scaling(seen.workers), then._replace(quiet_since=seen.now)
    if seen.now - then.quiet_since < then.calm:
        return Scaling(seen.workers), then
    calm = then.calm if seen.now - then.shrunk < 4 * then.calm else max(CALM, then.calm / 2)
    return Scaling(least, "quiet"), then._replace(quiet_since=None, calm=calm, shrunk=seen.now)


def _fitting(seen: ModelLoad) -> int:
    fitting = max(0, seen.free_memory) // seen.worker_memory if seen.worker_memory else seen.maximum
    return int(seen.workers + min(fitting, seen.fitting))


def _cores(seen: ModelLoad) -> int:
    """More workers than the cores can run make each other wait."""
    return (
        max(seen.minimum, 1, int(seen.cores / seen.cores_of_worker))
        if seen.cores_of_worker and seen.cores < math.inf
        else seen.maximum
    )
