"""Which batch keeps a latency target, and which requests are refused on arrival: pure functions, without a clock.

A request that has to wait is accepted if its batch can begin early enough: with the time that a batch of the size that is aimed at takes,
it is answered within the target. All that waits then fits into batches of that size, so a request that comes early does not force
a batch that is too small to be worth its time.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from tsx_runtime.core.slo.curve import LatencyCurve

UNKNOWN = 0.25  # of the target: what a batch is taken to last before one was measured


class Aim(NamedTuple):
    """What the curve says of one target at this load."""

    size: int  # of the batches that requests are accepted for
    wait: float  # seconds from its arrival by which the batch of a request has to begin; not negative
    ahead: float  # seconds that a batch before it is expected to take


class Admission(NamedTuple):
    waiting: int  # requests that may wait in all, as far as was asked
    opens: float  # when one more may, if none leaves before: now where there is room


def factor(curve: LatencyCurve, target: float) -> float:
    """How many typical times a batch is given: those of the quantile, or of the mean if not even one request keeps the target by that."""
    return curve.tail if curve.typical(1) * curve.tail <= target else curve.mean


def aim(curve: LatencyCurve, target: float, rate: float, workers: int) -> Aim:
    """`rate`: requests a second that arrive, whether they are accepted or not.

    The largest batch that can be gathered in time: while its requests wait, either `rate` brings as many, or one of the workers
    is done with a batch as large.
    """
    if not curve.known:
        return Aim(1, target - target * UNKNOWN, target * UNKNOWN)
    own, mean = factor(curve, target), curve.mean
    low, high = 1, curve.most
    while low < high:
        size = (low + high + 1) // 2
        typical = curve.typical(size)
        gathering = min(size / rate if rate > 0 else math.inf, typical * mean / max(1, workers))
        low, high = (size, high) if typical * own + gathering <= target else (low, size - 1)
    return Aim(low, max(0.0, target - curve.typical(low) * own), curve.typical(low) * mean)


def batch_size(curve: LatencyCurve, target: float, arrivals: Iterable[float], start: float) -> int:
    """The largest batch that keeps the target for the oldest request if it begins at `start`; one at least.

    `arrivals` are those of the waiting requests in the order in which they are served. One that is late even if it runs alone
    does not make the batches smaller that the others need.
    """
    if not curve.known:
        return 1
    own = factor(curve, target)
    alone = curve.typical(1) * own
    slack = next((left for arrived in arrivals if (left := arrived + target - start) >= alone), target)
    return max(1, curve.largest(slack / own))


def admission(aimed: Aim, free: Sequence[float], now: float, waiting: int) -> Admission:
    """`free`: when each worker is done with what it has, not before `now`. A request that no other waits before and that an idle
    worker, or none, is there for has room in any case.
    """
    if not free:
        return Admission(1, now)
    ends = sorted(free)
    step = max(aimed.ahead, 1e-6)
    places, start = 0, now
    while places <= waiting:
        start = ends[0]
        places += aimed.size
        heapq.heapreplace(ends, start + step)
    in_time = start <= now + aimed.wait
    return Admission(places if in_time else waiting, now if in_time else start - aimed.wait)


def expected_end(began: float, sizes: Sequence[int], curve: LatencyCurve, now: float) -> float:
    """When a worker is done with batches of these sizes, of which the first began at `began`.

    One that has taken longer than expected is expected to take what its quantile says, and then once more as long as is typical.
    """
    if not sizes or not curve.known:
        return now
    typical = curve.typical(sizes[0])
    end = next((end for ratio in (curve.mean, curve.tail) if (end := began + typical * ratio) > now), now + typical)
    return end + sum(curve.typical(size) for size in sizes[1:]) * curve.mean
