"""Which batch keeps a latency target, and which requests are refused on arrival: pure functions,
without a clock.

A request that has to wait is accepted if its batch can begin early enough: with the time that a
batch of the size that is aimed at takes, it is answered within the target. A request that comes
early then does not force a batch that is too small to be worth its time. Sizes are numbers of
requests, or sums of their weights (see `RequestWeights`): without `weights`, each weighs 1.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Sequence
from itertools import islice, repeat
from typing import NamedTuple

from tsx_runtime.core.slo.curve import LatencyCurve

UNKNOWN = 0.25  # of the target: what a batch is taken to last before one was measured


class Aim(NamedTuple):
    """What the curve says of one target at this load."""

    size: int  # of the batches that requests are accepted for
    wait: (
        float  # seconds from its arrival by which the batch of a request has to begin; not negative
    )
    ahead: float  # seconds that a batch before it is expected to take


class QueueRoom(NamedTuple):
    waiting: float  # requests that may wait in all, as far as was asked
    opens: float  # when one more may, if none leaves before: now where there is room


def factor(curve: LatencyCurve, target: float) -> float:
    """How many typical times a batch is given: those of the quantile, or of the mean if not even
    one request keeps the target by that.
    """
    return curve.tail if curve.typical(1) * curve.tail <= target else curve.mean


def aim(curve: LatencyCurve, target: float, rate: float, workers: int) -> Aim:
    """`rate`: requests a second that arrive, whether they are accepted or not.

    The largest batch that can be gathered in time: while its requests wait, either `rate` brings as
    many, or one of the workers is done with a batch as large.
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


def batch_size(
    curve: LatencyCurve,
    target: float,
    arrivals: Iterable[float],
    start: float,
    aimed: int,
    weights: Iterable[float] = repeat(1),
) -> float:
    """The largest batch that keeps the target for the oldest request if it begins at `start`; one
    at least.

    By its quantile, or up to the size that is `aimed` at by its mean: smaller batches would have
    the next ones begin later still. `arrivals` are those of the waiting requests in the order in
    which they are served. Those that are late even if they run alone count no more: a batch is as
    large as the first other one allows, or, if that would not reach it, takes all that are late.
    """
    if not curve.known:
        return 1
    own, mean = factor(curve, target), curve.mean
    late = 0.0
    for arrived, weight in zip(arrivals, weights, strict=False):
        slack = arrived + target - start
        size = max(curve.largest(slack / own), min(aimed, curve.largest(slack / mean)))
        if size > late:
            return size
        if size:
            break
        late += weight
    return max(1, min(late, curve.largest(target / own)))


def fill(size: float, weights: Sequence[float], first: int, waiting: int) -> tuple[int, float]:
    """Of the waiting requests from the `first` on, how many make up a batch of that size, and its
    weight; one at least.
    """
    if not weights:
        count = min(int(size), waiting - first)
        return count, count
    count, total = 1, weights[first]
    while first + count < waiting and total + weights[first + count] <= size:
        total += weights[first + count]
        count += 1
    return count, total


def admission(
    curve: LatencyCurve,
    target: float,
    aimed: Aim,
    arrivals: Sequence[float],
    free: Sequence[float],
    now: float,
    weights: Sequence[float] = (),
    weight: float = 1,
    between: float = 0.0,
) -> QueueRoom:
    """`arrivals`: as for `batch_size`; `free`: when each worker is done with what it has, not
    before `now`; `weight`: of the new request. `between`: seconds from the end of a batch to the
    start of the next one, in which other models have the device.

    What waits already is batched as it will be. A request that no other waits before and that an
    idle worker, or none, is there for has room in any case.
    """
    waiting = len(arrivals)
    if not free:
        return QueueRoom(1, now)
    ends = sorted(free)
    places, room = 0, 0.0
    while places < waiting:
        start = ends[0]
        own = islice(weights, places, None) if weights else repeat(1)
        size = batch_size(curve, target, islice(arrivals, places, None), start, aimed.size, own)
        count, total = fill(size, weights, places, waiting)
        places, room = places + count, size - total
        heapq.heapreplace(
            ends,
            start
            + between
            + (curve.typical(max(size, total)) * curve.mean if curve.known else aimed.ahead),
        )
    if room >= weight:  # in a batch that it can join
        return QueueRoom(waiting + room, now)
    latest = now + aimed.wait
    return (
        QueueRoom(waiting + max(aimed.size, weight), now)
        if ends[0] <= latest
        else QueueRoom(waiting, ends[0] - aimed.wait)
    )


def expected_end(began: float, sizes: Sequence[float], curve: LatencyCurve, now: float) -> float:
    """When a worker is done with batches of these sizes, of which the first began at `began`.

    One that has taken longer than expected is expected to take what its quantile says, and then
    once more as long as is typical.
    """
    if not sizes or not curve.known:
        return now
    typical = curve.typical(sizes[0])
    end = next(
        (end for ratio in (curve.mean, curve.tail) if (end := began + typical * ratio) > now),
        now + typical,
    )
    return end + sum(curve.typical(size) for size in sizes[1:]) * curve.mean
